"""The harness's side of the repeat guard: chooses, proves and audits it.

The guard runs in the engine (`server_patch.repeat_terminate`). A provider that wants one refuses an engine without it
or with other limits. Every turn is checked again with the same detector; the engine's signal stands, disagreements are
counted.
"""

from collections.abc import Mapping
from typing import NamedTuple
from uuid import uuid4

from harness.engines.base import Capabilities, TokenProvider
from harness.errors import EngineReplyInvalid, ScenarioError
from harness.tokens.tokenizer import Tokenizer
from harness.types import FinishReason, GenerationRequest, SamplingParams, Turn, as_ids
from server_patch.repeat_terminate import OBJECT_KEY_TEXT, ConfigError, RepeatDetector, RepeatTerminateConfig
from server_patch.repeat_terminate.config import ENABLE

_PROBE_TOKENS = 2  # more than one: at the last token of a budget the length limit speaks first

GUARD_PROBE = SamplingParams(_PROBE_TOKENS, temperature=0.0, ignore_eos=True)
"""Parameters of the request for a server's guard limits; the guard ends it at its first token."""


def choose_guard(stated: RepeatTerminateConfig | None, environ: Mapping[str, str]) -> RepeatTerminateConfig | None:
    """Return the stated guard, else the environment's, or None. Raises `ScenarioError` if invalid."""
    try:
        config = RepeatTerminateConfig.from_environ(environ) if stated is None else stated
    except ConfigError as error:
        raise ScenarioError(f"repeat guard: {error}") from error
    return config if config is not None and config.enabled else None


def require_guard(capabilities: Capabilities, wanted: RepeatTerminateConfig) -> None:
    """Raise `ScenarioError` unless the engine runs the wanted guard."""
    if capabilities.repeat_guard == wanted.digest():
        return
    found = (
        "has none that is active"
        if capabilities.repeat_guard is None
        else f"runs one with other limits (digest {capabilities.repeat_guard[:12]})"
    )
    settings = " ".join(f"{name}='{value}'" for name, value in wanted.to_environ().items() if value)
    raise ScenarioError(
        f"a repeat guard is wanted (digest {wanted.digest()[:12]}), the {capabilities.engine} engine {found};"
        f" start its server with the harness's plugin installed, not left out by SGLANG_PLUGINS or VLLM_PLUGINS, and"
        f" {settings} (docs/repeat-guard.md),"
        f" or do without: unset {ENABLE} here, or drop engine.repeat_guard from the scenario"
    )


async def prove_guard(provider: TokenProvider, config: RepeatTerminateConfig, key_ids: list[int]) -> None:
    """Raise `EngineReplyInvalid` unless the guard ends a repetition begun in an earlier request."""
    ids = tripping_ids(config, key_ids)
    room = provider.capabilities.context_length - len(ids) - _PROBE_TOKENS
    if room < 0:
        raise ScenarioError(
            f"repeat guard: it can trip after {len(ids)} tokens of output at the earliest, the context holds"
            f" {provider.capabilities.context_length}; lower min_new_tokens, ngram_size or ngram_repeats"
        )
    result = await provider.generate(
        GenerationRequest(as_ids(ids), GUARD_PROBE, request_id=uuid4().hex, continues=len(ids))
    )
    if (result.finish_reason, result.output_ids.size) != (FinishReason.REPEAT, 1):
        raise EngineReplyInvalid(
            f"the repeat guard of the {provider.capabilities.engine} engine is enabled but not active: expected an"
            f" output that repeats itself to end with 'repeat' at its next token, got {result.output_ids.size} tokens"
            f" and {result.finish_reason.value!r}"
        )


def tripping_ids(config: RepeatTerminateConfig, key_ids: list[int]) -> list[int]:
    """Return the shortest output of `key_ids` that trips the guard."""
    ngrams = config.ngram_matches + config.ngram_size if config.ngram_matches else 0
    run = min((limit for limit in (config.max_consecutive_token_repeats, ngrams) if limit), default=0)
    if not run:
        return [*key_ids[:1] * config.min_new_tokens, *key_ids * (config.max_object_keys or 0)]
    return key_ids[:1] * max(run, config.min_new_tokens)


def object_key_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that `max_object_keys` counts."""
    return tokenizer.encode(OBJECT_KEY_TEXT)


class Disagreement(NamedTuple):
    """Signal of the guard and result of the detector."""

    signaled: bool
    expected_at: int | None
    """Index of the token that trips the detector, or None."""
    output_tokens: int


class SignalCheck(NamedTuple):
    """Repeats the detection on recorded turns."""

    config: RepeatTerminateConfig
    key_ids: list[int]

    def disagreement(self, turn: Turn) -> Disagreement | None:
        ids = turn.output_ids[: turn.output_ids.size - turn.forced_tokens]
        at = RepeatDetector(self.config, self.key_ids).push_all(ids.tolist())
        # At the token that trips the detector, a turn may also end for another reason, which it then reports.
        agrees = at == ids.size - 1 or (at is None and not turn.repeat_terminated)
        return None if agrees else Disagreement(turn.repeat_terminated, at, int(ids.size))

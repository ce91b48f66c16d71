"""The interface between sessions and engines: `TokenProvider` takes token ids and returns token ids.

Every implementation keeps these promises:

- the output of `generate` is exactly what was sampled: one logprob per token, version spans that cover it (I6);
- a generation that any abort cuts short ends with `FinishReason.ABORT` and its partial output, never as a stop (I2);
- ids outside the vocabulary are refused before they reach the engine;
- a request with `script_ids` outputs exactly these ids or is refused;
- cancelling the awaiting task stops the generation inside the engine;
- failures are `EngineError`s.

A provider does not retry, does not queue sessions, and does not know what a turn is.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self, assert_never, runtime_checkable

import numpy as np

from harness.engines.recorded_rows import check_asked, require_masks
from harness.errors import EngineRejected
from harness.samples.versions import LabelOrder, is_unsettled
from harness.token_rows import RoutedExperts
from harness.types import GenerationDelta, GenerationRequest, GenerationResult, PromptLogprobs, SamplingParams, TokenIds


class LogprobScale(StrEnum):
    """Distribution from which the logprob of a sampled token is taken."""

    RAW = "raw"
    """Before temperature and filters."""
    AFTER_TEMPERATURE = "after_temperature"
    UNKNOWN = "unknown"
    """Not measurable, since the model is certain of every token; nothing is scored."""


def is_on_prompt_scale(scale: LogprobScale, params: SamplingParams) -> bool:
    """Return True if logprobs sampled by `params` are comparable to prompt logprobs, which are always raw."""
    # Where tokens were forbidden, even SGLang's raw logprobs are normalized without them; with a mask, over it.
    if params.sampling_mask:
        return False
    match scale:
        case LogprobScale.RAW:
            return not params.forbids_tokens
        case LogprobScale.AFTER_TEMPERATURE:
            return not params.forbids_tokens and not params.filters_tokens and params.temperature == 1.0
        case LogprobScale.UNKNOWN:
            return False
        case _:
            assert_never(scale)


class PauseMode(StrEnum):
    """Effect of a pause on generations in flight."""

    ABORT = "abort"
    """End with the partial output and `FinishReason.ABORT`."""
    KEEP = "keep"
    """Freeze with the KV cache and continue after `resume`."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Abilities of an engine and its model, stated when the provider connects."""

    engine: str
    """`local`, `scripted`, `sglang`, `vllm`."""
    model: str
    vocab_size: int
    """Ids are valid in `0..vocab_size-1`."""
    context_length: int
    """Prompt plus output, in tokens."""
    logprob_scale: LogprobScale
    pause_modes: frozenset[PauseMode]
    max_top_logprobs: int
    follows_json_schema: bool
    can_update_weights: bool
    weights_digest: str = ""
    """Digest of the initial weights; may be empty."""
    repeat_guard: str | None = None
    """Digest of a proven guard's configuration, else None."""
    may_stop_early: bool = True
    """True if a stop string ends an output even before `min_new_tokens`."""
    version: str = ""
    follows_scripts: bool = False
    """True if `script_ids` are followed; for a server, proven by a test."""
    routed_experts: RoutedExperts | None = None
    """Router whose choices are returned on request; for a server, found by a test."""
    max_mask_ids: int = 0
    """Most candidates of a token that sampling masks hold; 0 if none are returned."""


@dataclass(frozen=True, slots=True)
class EngineHealth:
    ready: bool
    """True if requests are accepted, as they are while paused."""
    paused: bool
    running: int
    waiting: int
    detail: str = ""


class WorkerStatus(NamedTuple):
    name: str
    """URL, or position in a fixed pool; empty for an engine on its own."""
    weight_version: str
    fence: str
    """Reason for not serving, if any."""
    in_flight: int
    sessions: int
    """Last served there."""


class EngineCount(NamedTuple):
    """The engine's own token counters, and this provider's requests."""

    engine: str
    start: str
    """Identifies the period counted, which a restart ends; empty if unknown."""
    tokens: int
    scored: int = 0
    """Sampled only because scoring requires it; part of `tokens`."""
    scored_unheard: int = 0
    """Upper bound on tokens of unanswered scoring requests."""
    requests: int = 0
    """Sampling requests of all clients."""
    own_requests: int = 0
    uncounted: int = 0
    """Requests not in `tokens`: running, refused, or otherwise uncounted."""


class PoolObserver(Protocol):
    """Counts pool events."""

    def session_moved(self, recomputed_tokens: int) -> None:
        """Count a session that another worker took over."""

    def workers_serving(self, count: int) -> None:
        """Record the number of serving workers."""


class EngineWorkers(Protocol):
    """Workers of a pool, or a single engine, which is never fenced."""

    def __iter__(self) -> Iterator[WorkerStatus]: ...

    @property
    def providers(self) -> Mapping[str, "TokenProvider"]:
        """Every worker by name."""

    @property
    def serving(self) -> Mapping[str, "TokenProvider"]:
        """Workers that accept requests."""

    def next_for(self, session_id: str) -> str | None:
        """Return the worker for the session's next request, or None while none serves."""

    def fence(self, name: str, reason: str) -> None:
        """Keep the worker from serving sessions; running requests and control verbs continue."""

    def unfence(self, name: str) -> None:
        """Let the worker serve, unless its weights are old or unsettled. Idempotent."""

    def count_labels_by(self, order: LabelOrder) -> None:
        """Use `order` to decide which of two weight labels is newer."""

    def observe(self, observer: PoolObserver) -> None:
        """Report to `observer` from now on."""

    def excuse_silence(self, while_held: Callable[[], bool]) -> None:
        """Keep silent workers while `while_held` returns True: loading weights blocks answers."""


class TokenProvider(Protocol):
    """An engine: an async context manager that starts and stops it."""

    @property
    def capabilities(self) -> Capabilities:
        """Valid once the provider has been entered."""

    @property
    def weight_version(self) -> str:
        """Label of the weights that would sample now, as last reported."""

    @property
    def workers(self) -> EngineWorkers:
        """Engines that requests may go to."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Sample a continuation of the request's input. Raises `EngineError`."""

    def stream(self, request: GenerationRequest) -> AsyncIterator[GenerationDelta | GenerationResult]:
        """Sample like `generate`; yield deltas and, last, the whole result."""

    async def score(
        self, input_ids: TokenIds, *, start: int, session_id: str | None = None, top: int = 0
    ) -> PromptLogprobs:
        """Return logprobs of `input_ids[start:]`, `start` >= 1, each given all before it, with `top` alternatives."""

    async def abort(self, request_id: str | None) -> int:
        """End one generation, or all (None), with `FinishReason.ABORT`. Return how many were aborted."""

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling until `resume`; new requests wait. Idempotent."""

    async def resume(self) -> None:
        """Sample again. Idempotent. Raises `WeightsUnsettled` if a weight update is incomplete."""

    async def update_weights(self, path: Path, version: str) -> None:
        """Load the checkpoint in `path` between two sampled tokens; later tokens carry `version`.

        Raises `EngineRejected` if nothing changed; the old weights continue to serve. Raises `WeightsUnsettled` if the
        update failed later: the engine stays paused under a label that is no version until an update succeeds.
        Cancellation leaves one of these states.
        """

    async def read_version(self) -> str:
        """Update `weight_version` from the engine and return it. Raises `EngineError`."""

    async def health(self) -> EngineHealth:
        """Report the state without waiting for a generation."""


@runtime_checkable
class CountsTokens(Protocol):
    """An engine with a token counter of its own, audited against the ledger."""

    async def count_sampled(self) -> EngineCount:
        """Read the counters, which may lag behind. Raises `EngineError`."""


@dataclass(frozen=True)
class OneWorker:
    """`EngineWorkers` of an engine on its own."""

    provider: TokenProvider

    @cached_property
    def providers(self) -> Mapping[str, TokenProvider]:
        """The engine, under an empty name."""
        return {"": self.provider}

    def __iter__(self) -> Iterator[WorkerStatus]:
        return iter([WorkerStatus("", self.provider.weight_version, fence="", in_flight=0, sessions=0)])

    @property
    def serving(self) -> Mapping[str, TokenProvider]:
        """The engine, unless its weights are unsettled."""
        return {} if is_unsettled(self.provider.weight_version) else self.providers

    def next_for(self, session_id: str) -> str | None:
        """Return the engine's empty name."""
        return ""

    def fence(self, *_: Any, **__: Any) -> None:
        """Do nothing, as a single engine is never fenced; so do the four below."""

    unfence = count_labels_by = observe = excuse_silence = fence


@runtime_checkable
class ContinuesAtEntry(Protocol):
    """Provider for a server that may have been left paused."""

    continues_at_entry: bool
    """True to resume the server at entry; set it before."""


@runtime_checkable
class ExpectsTransfer(Protocol):
    """Provider for a server whose weights another program may load."""

    async def expect_transfer(self, version: str) -> None:
        """Label the paused server as unsettled until `version` is loaded. Raises `EngineError`."""


@runtime_checkable
class FlushesPrefixes(Protocol):
    """Provider with a prefix cache in this process."""

    async def flush_cache(self) -> bool:
        """Drop cached prefixes. Return False, with nothing changed, if requests are live and not paused."""


@runtime_checkable
class ProvesScripts(Protocol):
    """Provider for a server that may follow scripts."""

    proves_scripts: bool
    """True to test this at entry; set it before. Untested servers follow none."""


def check_request(capabilities: Capabilities, request: GenerationRequest) -> None:
    """Raise `EngineRejected` for a request that no engine could serve."""
    # One id outside the vocabulary kills a whole SGLang server, so ids are checked here for every engine.
    input_ids, params, start = request.input_ids, request.params, request.prompt_logprobs_from
    _check_ids(capabilities, input_ids, "input")
    if request.script_ids is not None:
        if not capabilities.follows_scripts:
            raise EngineRejected(
                f"{capabilities.engine} is not known to follow scripts (docs/scenarios.md);"
                " nothing is sampled in their place"
            )
        _check_ids(capabilities, request.script_ids, "script")
    if input_ids.size >= capabilities.context_length:
        raise EngineRejected(
            f"{input_ids.size} input tokens leave no room in a context of {capabilities.context_length};"
            " shorten the prompt"
        )
    if params.max_new_tokens < 1:
        raise EngineRejected(f"max_new_tokens must be at least 1, got {params.max_new_tokens}")
    if not 0 <= params.top_logprobs <= capabilities.max_top_logprobs:
        raise EngineRejected(f"top_logprobs must be 0..{capabilities.max_top_logprobs}, got {params.top_logprobs}")
    if not 0 <= params.min_new_tokens <= params.max_new_tokens:
        raise EngineRejected(f"min_new_tokens must be 0..{params.max_new_tokens}, got {params.min_new_tokens}")
    if params.json_schema is not None and not capabilities.follows_json_schema:
        raise EngineRejected(f"{capabilities.engine} cannot hold an output to a JSON schema")
    if not 0 <= request.continues <= input_ids.size:
        raise EngineRejected(f"continues must be 0..{input_ids.size}, the number of input ids, got {request.continues}")
    if start is not None and not 1 <= start <= input_ids.size:
        raise EngineRejected(f"prompt logprobs start at 1..{input_ids.size}, got {start}")
    check_asked(capabilities.engine, capabilities.routed_experts, request)
    require_masks(capabilities.engine, capabilities.max_mask_ids, params)


def _check_ids(capabilities: Capabilities, ids: TokenIds, what: str) -> None:
    if ids.size == 0:
        raise EngineRejected(f"expected at least one {what} id, got none")
    if ids.view(np.uint32).max() >= capabilities.vocab_size:  # as unsigned, a negative id is beyond every vocabulary
        culprit = int(ids.min()) if ids.min() < 0 else int(ids.max())
        raise EngineRejected(f"token id {culprit} is outside the vocabulary (0..{capabilities.vocab_size - 1})")

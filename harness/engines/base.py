"""The seam between sessions and whatever samples tokens.

A `TokenProvider` takes token ids and returns token ids; text, templates and messages never cross it. Every
implementation keeps these promises:

- the output of `generate` is exactly what was sampled, with one logprob each and version spans that cover it (I6);
- a generation cut short by anybody's abort ends with `FinishReason.ABORT` and its partial output, never as a stop (I2);
- ids outside the vocabulary are refused before they reach the engine;
- a request with `script_ids` says exactly these, or is refused: nothing is sampled in their place;
- cancelling the awaiting task stops the generation inside the engine;
- failures are `EngineError`s.

It does not retry, does not queue sessions, and does not know what a turn is.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, Self, assert_never, runtime_checkable

import numpy as np

from harness.errors import EngineRejected
from harness.samples.versions import LabelOrder, is_unsettled
from harness.types import (
    GenerationDelta,
    GenerationRequest,
    GenerationResult,
    PromptLogprobs,
    SamplingParams,
    TokenIds,
)


class LogprobScale(StrEnum):
    """The distribution that the logprob of a sampled token is taken from."""

    RAW = "raw"
    """The model's own distribution, before temperature and filters."""
    AFTER_TEMPERATURE = "after_temperature"
    """The distribution after the division by the temperature."""
    UNKNOWN = "unknown"
    """Nobody could measure it: the model is certain of every token. Nothing is scored."""


def is_on_prompt_scale(scale: LogprobScale, params: SamplingParams) -> bool:
    """Whether logprobs sampled by `params` may stand beside prompt logprobs, which are raw on every engine.

    Those sampled while tokens were forbidden may not: what was left out is missing even in SGLang's raw logprobs.
    """
    match scale:
        case LogprobScale.RAW:
            return not params.forbids_tokens
        case LogprobScale.AFTER_TEMPERATURE:
            return not params.forbids_tokens and params.temperature == 1.0
        case LogprobScale.UNKNOWN:
            return False
        case _:
            assert_never(scale)


class PauseMode(StrEnum):
    """Whether generations in flight end or freeze when an engine is paused."""

    ABORT = "abort"
    """They end now, with their partial output and `FinishReason.ABORT`."""
    KEEP = "keep"
    """They freeze with their KV cache and go on after `resume`."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The abilities of an engine and the model it serves; stated at connect, never guessed later."""

    engine: str
    """`local`, `scripted`, `sglang`, `vllm`."""
    model: str
    """Name of the served model."""
    vocab_size: int
    """Ids are valid in `0..vocab_size-1`."""
    context_length: int
    """Prompt plus output, in tokens."""
    logprob_scale: LogprobScale
    pause_modes: frozenset[PauseMode]
    max_top_logprobs: int
    follows_json_schema: bool
    """Can hold an output to a JSON schema."""
    can_update_weights: bool
    weights_digest: str
    """Digest of the weights at start, empty when the engine cannot tell."""
    repeat_guard: str | None = None
    """Digest of the repeat guard's configuration; None when no guard was proven to be active."""
    may_stop_early: bool = True
    """Ends an output at a stop string among its first `min_new_tokens` too."""
    version: str = ""
    """Of the server's program; empty when the engine runs in this process, or does not say."""
    follows_scripts: bool = False
    """Says the ids that a request tells it to (`script_ids`); proven, where it is a server."""


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """A look at an engine that does not disturb it."""

    ready: bool
    """Accepts requests; a paused engine is ready."""
    paused: bool
    running: int
    """Generations in flight."""
    waiting: int
    """Requests that were accepted and have not started."""
    detail: str = ""


class WorkerStatus(NamedTuple):
    """One worker of a provider, as it stands."""

    name: str
    """Its URL; its position in a pool that was given its workers; empty for an engine on its own."""
    weight_version: str
    fence: str
    """Why it serves nobody; empty while it serves."""
    in_flight: int
    sessions: int
    """Sessions that were served there last."""


class EngineCount(NamedTuple):
    """An engine's own count of what it has sampled, for whoever asked, and what this process knows of it."""

    engine: str
    """As messages call it."""
    start: str
    """Stands for the time since which engine and provider count: another one after a restart. Empty: it tells none."""
    tokens: int
    """All that it has sampled."""
    scored: int = 0
    """Of these, the tokens that a request of ours had to sample to score its input; no session gets them."""
    scored_unheard: int = 0
    """The most that requests of that kind can have sampled that were not answered."""
    requests: int = 0
    """Those that could sample, whoever sent them."""
    own_requests: int = 0
    """Those of them that this provider sent."""
    uncounted: int = 0
    """Those of them that are not in `tokens`: they go on, were refused, or ended in a way that it does not count."""


class PoolObserver(Protocol):
    """Counts what a pool does; the metrics of a server are one."""

    def session_moved(self, recomputed_tokens: int) -> None:
        """A session was served by another worker than before, which had to compute that many tokens anew."""

    def workers_serving(self, count: int) -> None:
        """How many workers serve now."""


class EngineWorkers(Protocol):
    """The engines behind a provider, one by one: those of a pool, or the engine itself when it is on its own.

    Several workers can be kept from serving one at a time, and may come and go. An engine on its own has nobody to
    hand its sessions to: it is never fenced, and whoever asks finds no fence in its status afterwards.
    """

    def __iter__(self) -> Iterator[WorkerStatus]: ...

    @property
    def providers(self) -> Mapping[str, "TokenProvider"]:
        """Every worker by its name, for whoever has to treat them one by one."""

    @property
    def serving(self) -> Mapping[str, "TokenProvider"]:
        """Those that new requests may go to."""

    def next_for(self, session_id: str) -> str | None:
        """Name of the worker that the session's next request goes to, as things stand; None while none serves."""

    def fence(self, name: str, reason: str) -> None:
        """The worker serves no session until `unfence`; what it works on goes on, control still reaches it."""

    def unfence(self, name: str) -> None:
        """The worker serves again, unless its weights speak against it. Idempotent."""

    def count_labels_by(self, order: LabelOrder) -> None:
        """Tell the newer of two weight labels by `order`, the durable one of a server."""

    def observe(self, observer: PoolObserver) -> None:
        """Have `observer` count from now on how sessions move, and how many workers serve."""

    def excuse_silence(self, while_held: Callable[[], bool]) -> None:
        """Let no worker go for being silent while `while_held` says that new work is held: one that loads is busy."""


class TokenProvider(Protocol):
    """An engine, as the session server sees it.

    An async context manager: entering starts it, leaving stops it.
    """

    @property
    def capabilities(self) -> Capabilities:
        """Valid once the provider has been entered."""

    @property
    def weight_version(self) -> str:
        """Label of the weights that would sample the next token, as far as it is known here."""

    @property
    def workers(self) -> EngineWorkers:
        """The engines that requests may go to: those of a pool, `OneWorker` for an engine on its own."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Sample a continuation of the request's input. Raises `EngineError`."""

    def stream(self, request: GenerationRequest) -> AsyncIterator[GenerationDelta | GenerationResult]:
        """Like `generate`, yielding deltas as they are sampled and the whole result last."""

    async def score(self, input_ids: TokenIds, *, start: int, session_id: str | None = None) -> PromptLogprobs:
        """Logprobs of `input_ids[start:]`, each given everything before it; `start` is at least 1.

        `session_id` says whose prefix it is: the engine may have computed it already.
        """

    async def abort(self, request_id: str | None) -> int:
        """End one generation, or all of them (None), with `FinishReason.ABORT`; returns how many were told to end."""

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling until `resume`; requests that arrive meanwhile wait. Idempotent."""

    async def resume(self) -> None:
        """Sample again. Idempotent. Raises `WeightsUnsettled` when its weights are half-way through an update."""

    async def update_weights(self, path: Path, version: str) -> None:
        """Load the checkpoint in `path` between two sampled tokens; later tokens carry `version`.

        Raises `EngineRejected` when the checkpoint was refused before anything changed: the old weights go on serving.
        Raises `WeightsUnsettled` when the update broke off later: nobody knows the weights, so the engine stays paused
        under a label that is no version until an update succeeds. A cancellation leaves one of the two states.
        """

    async def read_version(self) -> str:
        """Ask the engine for the label of its weights, which `weight_version` is from then on. Raises `EngineError`."""

    async def health(self) -> EngineHealth:
        """Never blocks on a generation, answers while paused."""


@runtime_checkable
class CountsTokens(Protocol):
    """An engine that counts what it samples, apart from what we make of it: an outside witness of the ledger."""

    async def count_sampled(self) -> EngineCount:
        """Its counters as they stand, which may be a moment behind its replies. Raises `EngineError`."""


@dataclass(frozen=True, slots=True)
class OneWorker:
    """The `EngineWorkers` of an engine on its own; see there."""

    provider: TokenProvider

    def __iter__(self) -> Iterator[WorkerStatus]:
        return iter([WorkerStatus("", self.provider.weight_version, fence="", in_flight=0, sessions=0)])

    @property
    def providers(self) -> Mapping[str, TokenProvider]:
        """The engine, without a name."""
        return {"": self.provider}

    @property
    def serving(self) -> Mapping[str, TokenProvider]:
        """The engine, unless an update of its weights is under way or broke off."""
        return {} if is_unsettled(self.provider.weight_version) else self.providers

    def next_for(self, session_id: str) -> str | None:
        """The engine, whatever its weights."""
        del session_id
        return ""

    def fence(self, name: str, reason: str) -> None:
        """Nothing: it goes on serving."""

    def unfence(self, name: str) -> None:
        """Nothing: it never was fenced."""

    def count_labels_by(self, order: LabelOrder) -> None:
        """Nothing: there is no other worker whose label could be newer."""

    def observe(self, observer: PoolObserver) -> None:
        """Nothing: no session moves."""

    def excuse_silence(self, while_held: Callable[[], bool]) -> None:
        """Nothing: nobody lets it go."""


@runtime_checkable
class ContinuesAtEntry(Protocol):
    """A provider for a server that may have been left paused by somebody who is gone."""

    continues_at_entry: bool
    """Continue the server when the provider is entered, before it is tested; set before that."""


@runtime_checkable
class ExpectsTransfer(Protocol):
    """A provider for a server whose weights somebody else may load, past the provider."""

    async def expect_transfer(self, version: str) -> None:
        """Have the server carry a label that is no version until whoever loads `version` gives it its own.

        The server must be paused. Raises `EngineError`.
        """


@runtime_checkable
class FlushesPrefixes(Protocol):
    """A provider that keeps the prefixes it has computed, in this process."""

    async def flush_cache(self) -> bool:
        """Forget every cached prefix; False, with nothing changed, while requests are live and not paused."""


@runtime_checkable
class ProvesScripts(Protocol):
    """A provider for a server that may be able to follow scripts, which only a test of it can tell."""

    proves_scripts: bool
    """Test that when the provider is entered; set before that. Untested servers follow none."""


def check_request(capabilities: Capabilities, request: GenerationRequest) -> None:
    """Refuse a request that no engine could serve, before it reaches one.

    One id outside the vocabulary kills a whole SGLang server, so the ids are checked here for everybody.
    Raises `EngineRejected` naming the offending value.
    """
    input_ids, params, start = request.input_ids, request.params, request.prompt_logprobs_from
    _check_ids(capabilities, input_ids, "input")
    if request.script_ids is not None:
        if not capabilities.follows_scripts:
            raise EngineRejected(
                f"{capabilities.engine} is not known to follow scripts (docs/scripts.md);"
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


def _check_ids(capabilities: Capabilities, ids: TokenIds, what: str) -> None:
    if ids.size == 0:
        raise EngineRejected(f"expected at least one {what} id, got none")
    if ids.view(np.uint32).max() >= capabilities.vocab_size:  # a negative one is beyond every vocabulary then
        culprit = int(ids.min()) if ids.min() < 0 else int(ids.max())
        raise EngineRejected(f"token id {culprit} is outside the vocabulary (0..{capabilities.vocab_size - 1})")

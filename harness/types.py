"""The values every layer speaks: what an engine is asked, what it answers, what a turn and a sample are.

Token ids are `int32` arrays, logprobs `float32` arrays (natural logarithm), both one-dimensional and never written
to after they were made. Everything here is immutable data; behavior lives in the layer that owns the concept.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NoReturn, Self
from uuid import uuid4

import numpy as np
import numpy.typing as npt
from msgspec import convert, json

from harness.turn_ends import TURN_ENDS, TurnEnd, TurnStatus

TokenIds = npt.NDArray[np.int32]
"""Token ids, shape [n]."""

Logprobs = npt.NDArray[np.float32]
"""Natural-log probabilities, shape [n]."""

Json = dict[str, Any]
"""A decoded JSON object: `Any` stays at this edge."""


def refuse_constant(name: str) -> NoReturn:
    """For `json.loads(..., parse_constant=...)`: NaN and Infinity are not JSON, and other parsers fail on them."""
    raise ValueError(f"{name} is not JSON")


Message = Mapping[str, Any]
"""A chat message in the OpenAI form, normalized by a dialect (`role`, `content`, `tool_calls`, ...)."""


class FinishReason(StrEnum):
    """Why an engine stopped generating."""

    STOP = "stop"
    """A stop token or stop string."""
    LENGTH = "length"
    """The token budget of the request, or the model's context."""
    REPEAT = "repeat"
    """The engine's repeat guard: the output repeated itself."""
    ABORT = "abort"
    """Somebody aborted the request; the output is a partial."""


class SampleStatus(StrEnum):
    """Status of a sample: that of its last turn (names and values as in miles)."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one generation."""

    max_new_tokens: int = 0
    """Upper bound on output tokens, at least 1."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    seed: int | None = None
    """Makes the request reproducible by itself; None draws a fresh seed."""
    stop: tuple[str, ...] = ()
    """Stop strings; the tokens of a match stay in the output."""
    stop_token_ids: tuple[int, ...] = ()
    """Stop ids beside the model's own end-of-turn ids; the id stays in the output."""
    ignore_eos: bool = False
    """Go on after the model's own end-of-turn ids."""
    top_logprobs: int = 0
    """Alternatives to report per output token."""
    min_new_tokens: int = 0
    """Output tokens before one of the model's own end-of-turn ids, or a stop id, may be sampled."""
    json_schema: str | None = None
    """JSON text of the schema that the output must follow; None leaves it free."""
    max_tokens: int | None = None
    """Another name of `max_new_tokens`, as vLLM and OpenAI have it; None afterwards. msgspec knows no `InitVar`."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            object.__setattr__(self, "max_new_tokens", self.max_tokens)
            object.__setattr__(self, "max_tokens", None)

    @property
    def forbids_tokens(self) -> bool:
        """A grammar or a least length leaves some tokens out, and engines count logprobs among the others."""
        return self.json_schema is not None or self.min_new_tokens > 0

    def to_dict(self) -> dict[str, Any]:
        """All of them by name."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "max_tokens"}


@dataclass(frozen=True, slots=True)
class SamplingWishes:
    """Sampling parameters somebody stated; None and empty mean that they did not.

    The same type holds what an agent asked for and what a rollout overrides.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None
    min_new_tokens: int | None = None
    json_schema: str | None = None
    stop_token_ids: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The parameters that were stated."""
        return {name: value for name in self.__slots__ if (value := getattr(self, name)) not in (None, ())}

    def override_with(self, other: "SamplingWishes") -> "SamplingWishes":
        """These wishes, with what `other` states in their place."""
        stated = other.to_dict()
        return replace(self, **stated) if stated else self


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Output tokens `start..end` (end exclusive) of one request were sampled by weights `version` (I6)."""

    version: str
    """The label that the engine had for its weights."""
    start: int
    end: int
    number: int | None = None
    """The policy version that the label stands for (`samples.versions`); None where the label says it itself."""


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """Alternatives per output token, best first: `ids` int32 [n, k], `logprobs` float32 [n, k]."""

    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """`logprobs[i]` is the logprob of input token `start + i` given all before it; `start` is at least 1."""

    start: int
    logprobs: Logprobs
    version: str
    """The label of the weights that scored; one version for the whole array."""
    number: int | None = None
    """Like `VersionSpan.number`."""


STREAM_INTERVAL = 50
"""Tokens between two deltas of a request that is asked for its whole: as many as SGLang keeps back by itself."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request to an engine: continue `input_ids`."""

    input_ids: TokenIds
    params: SamplingParams
    request_id: str
    """32 hex digits, fresh for every request: an engine knows a request in flight by it."""
    session_id: str | None = None
    """Lets the engine keep the KV cache of a session's prefix."""
    prompt_logprobs_from: int | None = None
    """Also return the logprobs of the input from here on; at least 1, None wants none."""
    continues: int = 0
    """The last `continues` input ids were sampled for this same turn; stop strings and guards look from there on."""
    script_ids: TokenIds | None = None
    """The output is exactly these ids, as far as it comes; None leaves it to the model."""
    on_delta: "Callable[[GenerationDelta], None] | None" = field(default=None, compare=False, repr=False)
    """Told of what comes before the end of `generate`, every `STREAM_INTERVAL` tokens or less often: a request that
    breaks has lost no more. None asks for the whole at once."""
    on_ids: "Callable[[Sequence[int]], None] | None" = field(default=None, compare=False, repr=False)
    """Told of the ids that are sampled, once in a while, for a reader who waits for them. They are of the vocabulary;
    what else an engine says of them is judged at the end. None: nobody reads along."""
    write_input: "Callable[[], bytes] | None" = field(default=None, compare=False, repr=False)
    """Writes `input_ids` as a JSON array, for whoever has most of that written; None has it written as a whole."""

    @classmethod
    def of(cls, request: Self | None, input_ids: Sequence[int], params: SamplingParams | None) -> Self:
        """Return `request`, or a fresh one that continues `input_ids`. Raises `ValueError` for both and for neither."""
        if request is not None and params is None:
            return request
        if request is None and params is not None:
            return cls(as_ids(input_ids), params, uuid4().hex)
        raise ValueError("expected a GenerationRequest, or input_ids and sampling_params")

    def tell(self, delta: "GenerationDelta") -> None:
        """Tell whoever wants to know that `delta` has come."""
        if self.on_delta is not None:
            self.on_delta(delta)
        if self.on_ids is not None:
            self.on_ids(delta.output_ids.tolist())

    def input_json(self) -> bytes:
        """`input_ids` as a JSON array."""
        return json.encode(self.input_ids.tolist()) if self.write_input is None else self.write_input()


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """The output of one engine request."""

    request_id: str
    input_ids: TokenIds
    output_ids: TokenIds
    logprobs: Logprobs
    """One per output token, on the engine's `LogprobScale`."""
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...]
    """Cover `output_ids` without gap or overlap; empty only for an empty output."""
    matched_stop: int | str | None = None
    """The stop id or stop string that ended the output."""
    top_logprobs: TopLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    forced_tokens: int = 0
    """Tokens at the end of the output that a guard forced: not sampled from the model, never trained."""
    unheard_tokens: int = 0
    """Tokens at most that the engine sampled behind these and did not hand over."""
    cached_tokens: int = 0
    """Input tokens whose KV cache was reused."""
    seconds: float = 0.0
    """As the engine counts them; of a result that a session server has, from `began_at` to its arrival there."""
    began_at: float | None = None
    """Unix seconds at which the session server asked; None before it has noted that."""
    queued_s: float = 0.0
    """Seconds that the request waited in a pool for a worker."""
    worker: str = ""
    """The name of the worker of a pool that answered; empty of an engine on its own."""


@dataclass(frozen=True, slots=True)
class GenerationDelta:
    """The next output tokens of a streamed generation; none where it only says more of those before."""

    output_ids: TokenIds
    logprobs: Logprobs
    version_spans: tuple[VersionSpan, ...] = ()
    """Of the whole output so far, from its first token on, as far as the engine has said by now."""


@dataclass(frozen=True, slots=True)
class TurnSegment:
    """The part of a turn that one engine request produced: output tokens `start..end` of the turn."""

    request_id: str
    start: int
    end: int
    finish_reason: FinishReason
    began_at: float | None = field(default=None, compare=False)
    """Unix seconds at which the engine was asked; None in records that do not say it."""
    seconds: float = field(default=0.0, compare=False)
    """From `began_at` to its end: in the queue of the pool, and in the engine."""
    queued_s: float = field(default=0.0, compare=False)
    """Seconds of those in the queue of the pool."""
    worker: str = field(default="", compare=False)
    """The worker of a pool that produced it; empty of an engine on its own."""


@dataclass(frozen=True, slots=True)
class Discarded:
    """Sampled tokens that are in no output: they count as generated and as dropped for `reason` (I4)."""

    request_id: str
    tokens: int
    reason: str
    """A `sessions.ledger.DropReason`."""


@dataclass(frozen=True, slots=True)
class UnknownOutput:
    """A request that an engine may have sampled more for than it handed over: beside the ledger's sum (I4)."""

    request_id: str
    at_most: int
    """Tokens that it can have sampled beyond those that arrived."""
    reason: str
    """The code of the error that kept them away; `given_up` or `retracted` where there was none."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call of a session, as recorded.

    The prompt is not stored whole: it is prompt + output of `parent`, then `context_ids` (I1, I11).
    """

    index: int
    """Position in the session, from 0, in order of admission."""
    parent: int | None
    """Index of the turn this one extends; None for the root of a branch."""
    status: TurnStatus
    end: TurnEnd
    """Why it ended."""
    context_ids: TokenIds
    """Prompt tokens that the parent does not have: delimiter, new messages, generation prompt."""
    prompt_length: int
    """Length of the whole prompt in tokens."""
    prompt_digest: str
    """blake2b-128 of the int32 bytes of the prompt as it went to the engine."""
    output_ids: TokenIds
    logprobs: Logprobs
    version_spans: tuple[VersionSpan, ...]
    segments: tuple[TurnSegment, ...]
    messages_delta: tuple[Message, ...]
    """Messages of the request that the parent does not have."""
    reply: Message
    """The assistant message as it was served."""
    sampling: Mapping[str, Any]
    """`{"asked": ..., "used": ...}`: the client's wishes and what the engine got."""
    key: bytes
    """Digest of the request's whole conversation and tools (`tokens.matching`)."""
    ordinal: int
    """How many turns of the session with this key were admitted before it; its seed depends on that."""
    request_digest: str
    """Of the request body: recognizes a retry (`sessions.retries`)."""
    created_at: float
    """Unix seconds at admission."""
    seconds: float
    """From admission to the engine's last token."""
    delivered: bool = False
    """The answer was handed to the client's connection completely."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """Facts worth keeping: `malformed_tool_call`, `error` (`code`, `cause`, `message`), `cached_tokens`, `attempts`,
    `script_step`, `held_s` and `held_before_s` (seconds at the gate, or in which an update of the weights was waited
    for, after its admission and before it); of its call `dialect`, `response_id`, `client` and what its dialect says
    (`ModelRequest.notes`)."""
    forced_tokens: int = 0
    """Tokens at the end of `output_ids` that a guard forced; never trained."""
    discarded: tuple[Discarded, ...] = ()
    unknown: tuple[UnknownOutput, ...] = ()
    """Its requests whose end was never heard."""
    proximal_logprobs: Logprobs | None = None
    """Per output token; None while every token holds its behavior value (I7)."""
    proximal_versions: npt.NDArray[np.int32] | None = None
    """The policy version each proximal logprob was computed under; None like `proximal_logprobs`."""

    @property
    def params(self) -> SamplingParams:
        """How the output was sampled."""
        return convert(self.sampling["used"], SamplingParams)

    @property
    def attempts(self) -> int:
        """How many times it was in flight: 1, and once more for each time it broke off and went on."""
        return int(self.notes.get("attempts", 1))

    @property
    def script_step(self) -> int | None:
        """The step of its session's script that it says, from 0; None when the model chose its words."""
        step = self.notes.get("script_step")
        return None if step is None else int(step)

    @property
    def masked_from(self) -> int:
        """Index of the first token of `output_ids` that is never trained: somebody else than the model chose it."""
        return int(self.output_ids.size) - self.forced_tokens if self.script_step is None else 0

    @property
    def asked_at(self) -> float:
        """Unix seconds at which its call came: what it was held at the gate is behind that."""
        return self.created_at - float(self.notes.get("held_before_s", 0.0))

    @property
    def ended_at(self) -> float:
        """Unix seconds at its end."""
        requests = ((each.began_at, each.seconds) for each in self.segments)
        return end_of_turn(self.asked_at, self.created_at + self.seconds, requests)

    @property
    def is_suspended(self) -> bool:
        """It broke off with nobody to answer; its partial output waits for a retry."""
        return self.status is not TurnStatus.FAILED and TURN_ENDS[self.end].waits

    @property
    def is_usable(self) -> bool:
        """Its output can be part of a sample, and of what comes after it."""
        return self.status is not TurnStatus.FAILED and not self.is_suspended

    @property
    def sampled_tokens(self) -> int:
        """Every token that was sampled for it, discarded ones included."""
        return int(self.output_ids.size) + sum(each.tokens for each in self.discarded)

    @property
    def repeat_terminated(self) -> bool:
        """The repeat guard ended this turn."""
        return self.end is TurnEnd.REPEAT


_NO_RETURNS: npt.NDArray[np.float32] = np.zeros(0, dtype=np.float32)
_NO_RETURNS.flags.writeable = False


@dataclass(frozen=True, slots=True)
class Sample:
    """One branch of a session, as the trainer gets it (field names as in miles).

    `tokens` is prompt and response; all per-token columns describe the last `response_length` tokens of it.
    """

    tokens: TokenIds
    response_length: int
    loss_mask: npt.NDArray[np.uint8]
    """1 on sampled tokens to train, 0 elsewhere; shape [response_length]."""
    rollout_log_probs: Logprobs
    """Behavior logprobs; 0.0 where no token was sampled."""
    status: SampleStatus
    weight_versions: tuple[str, ...]
    """Version labels in the order in which they sampled, without repeats in a row."""
    behavior_versions: npt.NDArray[np.int32]
    """Policy version that sampled each token; -1 where none did."""
    proximal_logprobs: Logprobs
    proximal_versions: npt.NDArray[np.int32]
    repeat_terminated: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    reward: float | None = None
    index: int | None = None
    group_index: int | None = None
    weight: float = 1.0
    """Its share of the tokens to train of its rollout, which counts once however many samples it became."""
    turn_rewards: tuple[float | None, ...] = ()
    """One per entry of `metadata["turns"]`, None where a turn was given none; empty where no turn was."""
    returns: npt.NDArray[np.float32] = field(default_factory=lambda: _NO_RETURNS)
    """What the turn that sampled the token and those after it have earned (`samples.turn_rewards`), 0 where none did;
    shape [response_length], or [0] like `turn_rewards`."""


def end_of_turn(asked_at: float, ended_at: float, requests: Iterable[tuple[float | None, float]]) -> float:
    """Unix seconds at the end of a turn whose first admission, with its seconds, came to `ended_at`.

    The seconds of one that broke off and went on lack those in between; its `requests` to engines, each with its
    beginning and its seconds, do not.
    """
    ends = [began_at + seconds for began_at, seconds in requests if began_at is not None]
    return max(ended_at, asked_at, *ends)


def as_ids(ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> TokenIds:
    """`ids` as a read-only int32 array."""
    array = np.asarray(ids, dtype=np.int32).view()
    array.flags.writeable = False
    return array


def as_logprobs(values: Sequence[float] | npt.NDArray[np.floating[Any]]) -> Logprobs:
    """`values` as a read-only float32 array."""
    array = np.asarray(values, dtype=np.float32).view()
    array.flags.writeable = False
    return array

"""Values that every layer shares: engine requests and results, turns, samples.

Token ids are one-dimensional `int32` arrays, logprobs one-dimensional `float32` arrays (natural logarithm), never
written to after creation. The layer that owns a concept has its behavior.
"""

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple, NoReturn, Self
from uuid import uuid4

import numpy as np
import numpy.typing as npt
from msgspec import Struct, json
from msgspec.structs import astuple

from harness.decoding import convert
from harness.notebook import card, token_bar
from harness.sampling_masks import SampleMasks
from harness.token_rows import RaggedRows, SampleRows, TokenRows, TurnRows
from harness.top_logprobs import TopLogprobs
from harness.turn_ends import TURN_ENDS, TurnEnd, TurnStatus

TokenIds = npt.NDArray[np.int32]

Logprobs = npt.NDArray[np.float32]

Json = dict[str, Any]


def refuse_constant(name: str) -> NoReturn:
    """Raise `ValueError`, as `parse_constant` of `json.loads`."""
    # NaN and Infinity are not JSON, and other parsers fail on them.
    raise ValueError(f"{name} is not JSON")


def unique_keys(pairs: list[tuple[str, object]]) -> Json:
    """Return the object of `pairs`. Raises `ValueError`: parsers differ on a key that is repeated."""
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key is repeated")
    return dict(pairs)


Message = Mapping[str, Any]
"""OpenAI chat message, normalized by a dialect."""


Paced = Callable[[Iterable[Any]], Iterator[Any]]
"""Passes items on, like `iter`. A thread that takes them may rest in between."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    REPEAT = "repeat"
    ABORT = "abort"


class SampleStatus(StrEnum):
    """Status of a sample's last turn (names and values as in miles)."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    max_new_tokens: int = 0
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    """The tokens of a match stay in the output."""
    stop_token_ids: tuple[int, ...] = ()
    """Beside the model's end-of-turn ids; the id stays in the output."""
    ignore_eos: bool = False
    top_logprobs: int = 0
    min_new_tokens: int = 0
    """Minimum before an end-of-turn or stop id."""
    json_schema: str | None = None
    """JSON text of the schema to follow."""
    sampling_mask: bool = False
    """Return the candidates of each token, and its logprob over them, after temperature."""
    max_tokens: int | None = None
    """Alias of `max_new_tokens`, as in vLLM and OpenAI; None after construction."""

    def __post_init__(self) -> None:
        # msgspec does not support `InitVar`.
        if self.max_tokens is not None:
            object.__setattr__(self, "max_new_tokens", self.max_tokens)
            object.__setattr__(self, "max_tokens", None)

    @property
    def forbids_tokens(self) -> bool:
        """True if engines compute logprobs over the allowed tokens only."""
        # A grammar or a minimum length leaves some tokens out.
        return self.json_schema is not None or self.min_new_tokens > 0

    @property
    def filters_tokens(self) -> bool:
        """True if tokens are drawn from some of the vocabulary."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__ if name != "max_tokens"}


@dataclass(frozen=True, slots=True)
class SamplingWishes:
    """Parameters that an agent or rollout set; None and empty mean unset."""

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
        return {name: value for name in self.__slots__ if (value := getattr(self, name)) not in (None, ())}

    def override_with(self, other: "SamplingWishes") -> "SamplingWishes":
        stated = other.to_dict()
        return replace(self, **stated) if stated else self


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Output tokens `start..end` (end exclusive) that weights `version` sampled (I6)."""

    version: str
    start: int
    end: int
    number: int | None = None
    """Policy version of the label (`samples.versions`), if the label is not one."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of input tokens: `logprobs[i]` is of token `start + i`, and `start` is at least 1."""

    start: int
    logprobs: Logprobs
    version: str
    number: int | None = None
    """See `VersionSpan.number`."""
    top: TopLogprobs | None = None
    """Most likely tokens in the place of each; None unless asked for."""


class TeacherScores(NamedTuple):
    """Logprobs of a turn's output by a teacher, each given all before it."""

    version: str
    logprobs: Logprobs
    """One per output token."""
    top: TopLogprobs | None = None
    """Most likely tokens in the place of each; None unless asked for."""

    def first(self, tokens: int) -> "TeacherScores":
        top = None if self.top is None else self.top.part(0, tokens)
        return self._replace(logprobs=self.logprobs[:tokens], top=top)


STREAM_INTERVAL = 50
"""Tokens per delta when no client reads along (`on_ids`), as many as SGLang batches by default."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Engine request to continue `input_ids`."""

    input_ids: TokenIds
    params: SamplingParams
    request_id: str
    """32 hex digits, fresh for every request."""
    session_id: str | None = None
    """For the engine's KV cache."""
    prompt_logprobs_from: int | None = None
    """First input position to score, at least 1."""
    continues: int = 0
    """Final input ids sampled for this turn; stop strings and guards start there."""
    script_ids: TokenIds | None = None
    """Exact ids to output."""
    rows_from: int | None = None
    """First position whose routed experts to return; None for none."""
    on_delta: "Callable[[GenerationDelta], None] | None" = field(default=None, compare=False, repr=False)
    """Called every `STREAM_INTERVAL` tokens or less often; bounds the loss if the request breaks."""
    on_ids: "Callable[[Sequence[int]], None] | None" = field(default=None, compare=False, repr=False)
    """Called now and then with sampled ids. They are in the vocabulary; all other checks wait for the end."""
    write_input: "Callable[[], bytes | memoryview] | None" = field(default=None, compare=False, repr=False)
    """Writes `input_ids` as JSON from a cached prefix."""

    @classmethod
    def of(cls, request: Self | None, input_ids: Sequence[int], params: SamplingParams | None) -> Self:
        """Return `request`, or a new one for `input_ids`. Raise `ValueError` for both or neither."""
        if request is not None and params is None:
            return request
        if request is None and params is not None:
            return cls(as_ids(input_ids), params, uuid4().hex)
        raise ValueError("expected a GenerationRequest, or input_ids and sampling_params")

    def tell(self, delta: "GenerationDelta") -> None:
        if self.on_delta is not None:
            self.on_delta(delta)
        if self.on_ids is not None:
            self.on_ids(delta.output_ids.tolist())

    def input_json(self) -> bytes | memoryview:
        return json.encode(self.input_ids.tolist()) if self.write_input is None else self.write_input()


class GenerationResult(Struct, frozen=True):
    request_id: str
    input_ids: TokenIds
    output_ids: TokenIds
    logprobs: Logprobs
    """On the engine's `LogprobScale`."""
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...]
    """Cover `output_ids` without gap or overlap."""
    matched_stop: int | str | None = None
    top_logprobs: TopLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    rows: TokenRows | None = None
    """Routed experts from `rows_from` to the last token but one; None if the engine returned none."""
    masks: RaggedRows | None = None
    """Candidates of each output token, if `params.sampling_mask`; None if the engine returned none."""
    forced_tokens: int = 0
    """Final tokens that a guard forced; never trained."""
    unheard_tokens: int = 0
    """Upper bound on later tokens, sampled and not returned."""
    cached_tokens: int = 0
    seconds: float = 0.0
    """Engine's count; the session server replaces it with the time since `began_at`."""
    began_at: float | None = None
    """Unix seconds, set by the session server."""
    queued_s: float = 0.0
    worker: str = ""


@dataclass(frozen=True, slots=True)
class GenerationDelta:
    """Next streamed output tokens; empty if it only updates the version spans."""

    output_ids: TokenIds
    logprobs: Logprobs
    version_spans: tuple[VersionSpan, ...] = ()
    """Spans of the whole output so far, as far as known."""


@dataclass(frozen=True, slots=True)
class TurnSegment:
    """Output tokens `start..end` of a turn, from one engine request."""

    request_id: str
    start: int
    end: int
    finish_reason: FinishReason
    began_at: float | None = field(default=None, compare=False)
    """Unix seconds; None in old records."""
    seconds: float = field(default=0.0, compare=False)
    """Time since `began_at`, queue included."""
    queued_s: float = field(default=0.0, compare=False)
    worker: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Discarded:
    """Sampled tokens in no output, dropped for `reason` (I4)."""

    request_id: str
    tokens: int
    reason: str
    """A `sessions.ledger.DropReason`."""


@dataclass(frozen=True, slots=True)
class UnknownOutput:
    """Request for which an engine may have sampled more than it returned (I4)."""

    request_id: str
    at_most: int
    reason: str
    """Error code, else `given_up` or `retracted`."""


INHERITED_TRAINED, INHERITED_MASKED = "trained", "masked"
"""Values of `TurnNotes.inherited`."""


class TurnNotes(Struct, frozen=True, kw_only=True):
    """Facts of a turn besides its tokens. Their JSON has the ones that differ from the default, in this order."""

    cached_tokens: int | None = None
    """Prompt tokens in the engine's cache; None without engine output."""
    instructions: bool = False
    """The first message is the `instructions` of a Responses request."""
    call_forms: Json = {}
    """Form in which a Responses client reads the calls of a tool, by tool."""
    ignored: Json = {}
    """Fields not served, with their values (`dialects.ignored`)."""
    normalized: Json = {}
    """Names of which the client spelled an alias."""
    left_out: tuple[str, ...] = ()
    """Kinds of tools that the model does not see."""
    tools: int | None = None
    """Number of tools of a root, in old stores of every turn."""
    toolset: str = ""
    """Digest of a root's tools; hex."""
    tool_definitions: tuple[Json, ...] = ()
    """A root's tools, unless an earlier root has the same."""
    template_variables: Json = {}
    """Variables with which the chat template rendered a root."""
    model_family_faults: tuple[str, ...] = ()
    """Faults of the chat template, if a root has tools."""
    dialect: str = ""
    """Name of the client's dialect; empty in the oldest stores."""
    response_id: str = ""
    client: Json = {}
    """`user_agent`, `ids`, `traceparent` and `process` of the client."""
    matched_loosely: tuple[Json, ...] | Json = ()
    """Differences that the session's `matching` overlooked (`Divergence`); in old stores the one of the answer."""
    ambiguous: tuple[int, ...] = ()
    """Other turns that it could continue."""
    noise: str = ""
    """Text removed from a root."""
    held_before_s: float = 0.0
    """Seconds at the gate or waiting for weights, before admission."""
    diverged: Json = {}
    """Difference that made the turn a branch (`Divergence`)."""
    script_step: int | None = None
    """Step of the session's script, from 0."""
    attempts: int = 1
    """Times the turn was in flight."""
    held_s: float = 0.0
    """Seconds at the gate after admission."""
    malformed_tool_call: bool = False
    matched_stop: str = ""
    """Stop string that ended the output."""
    error: Json = {}
    """`code`, `cause` and `message`."""
    inherited: str = ""
    """Loss mask of a turn of an earlier session (`sessions.inheritance`); empty for the session's own."""
    asked_again: bool = False
    """The restarted agent repeated the call of an inherited turn."""
    missing_rows: Json = {}
    """Number of rows that no request returned, by `token_rows.RowState`."""
    rows_until: int = 0
    """Output tokens before the first missing row; 0 without one, too."""
    row_bytes: int = 0
    others: Json = {}
    """Notes of other versions and dialects."""

    @classmethod
    def from_json(cls, notes: Json) -> Self:
        """Decode notes. Raises `msgspec.ValidationError`."""
        others = {name: value for name, value in notes.items() if name not in _NOTES}
        return convert({**notes, "others": others}, cls)

    def to_json(self) -> Json:
        """Return the notes that differ from the default."""
        values = zip(_NOTES.items(), astuple(self), strict=False)  # `others` is the last field
        return {
            name: value for (name, default), value in values if value is not default and value != default
        } | self.others


_NOTES = {name: getattr(TurnNotes(), name) for name in TurnNotes.__struct_fields__ if name != "others"}


class Turn(Struct, frozen=True):
    """Recorded model call. Its prompt is prompt + output of `parent` + `context_ids` (I1, I11)."""

    index: int
    """Position in order of admission, from 0."""
    parent: int | None
    """None for a root."""
    status: TurnStatus
    end: TurnEnd
    context_ids: TokenIds
    """Prompt tokens that the parent lacks: delimiter, new messages, generation prompt."""
    prompt_length: int
    prompt_digest: str
    """blake2b-128 of the int32 bytes of the whole prompt."""
    output_ids: TokenIds
    logprobs: Logprobs
    version_spans: tuple[VersionSpan, ...]
    segments: tuple[TurnSegment, ...]
    messages_delta: tuple[Message, ...]
    """Messages that the parent lacks."""
    reply: Message
    sampling: Mapping[str, Any]
    """`{"asked": ..., "used": ...}`: the client's wishes and the engine's parameters."""
    key: bytes
    """Digest of conversation and tools (`tokens.matching`)."""
    ordinal: int
    """Number of earlier turns with this key; part of the seed."""
    request_digest: str
    """Identifies a retry (`sessions.retries`)."""
    created_at: float
    """Unix seconds at admission."""
    seconds: float
    """From admission to the last token."""
    delivered: bool = False
    """The client's connection took the whole answer."""
    notes: TurnNotes = TurnNotes()
    forced_tokens: int = 0
    discarded: tuple[Discarded, ...] = ()
    unknown: tuple[UnknownOutput, ...] = ()
    proximal_logprobs: Logprobs | None = None
    """None while every token holds its behavior value (I7)."""
    proximal_versions: npt.NDArray[np.int32] | None = None
    rows: TurnRows | None = None
    """Routed experts; None if not recorded, or if only the store has them."""
    masks: TurnRows | None = None
    """Sampling masks, in the same way."""
    teachers: Mapping[str, TeacherScores] = {}
    """By teacher; one that has not scored the turn is missing."""

    @property
    def params(self) -> SamplingParams:
        """Parameters the engine used."""
        return convert(self.sampling["used"], SamplingParams)

    @property
    def masked_from(self) -> int:
        """Index of the first output token never trained: the model did not choose it, or another session trains it."""
        # A guard forces the final tokens, a script all of them.
        is_trainable = self.notes.script_step is None and self.notes.inherited != INHERITED_MASKED
        return int(self.output_ids.size) - self.forced_tokens if is_trainable else 0

    @property
    def asked_at(self) -> float:
        """Unix seconds when the call arrived, before any wait at the gate."""
        return self.created_at - self.notes.held_before_s

    @property
    def ended_at(self) -> float:
        """Unix seconds at the end."""
        requests = ((each.began_at, each.seconds) for each in self.segments)
        return end_of_turn(self.asked_at, self.created_at + self.seconds, requests)

    @property
    def is_suspended(self) -> bool:
        """True if a partial output waits for a retry."""
        return self.status is not TurnStatus.FAILED and TURN_ENDS[self.end].waits

    @property
    def is_usable(self) -> bool:
        """True if samples and later turns can include it."""
        return self.status is not TurnStatus.FAILED and not self.is_suspended

    @property
    def sampled_tokens(self) -> int:
        return int(self.output_ids.size) + sum(each.tokens for each in self.discarded)

    @property
    def repeat_terminated(self) -> bool:
        return self.end is TurnEnd.REPEAT


_NO_RETURNS: npt.NDArray[np.float32] = np.zeros(0, dtype=np.float32)
_NO_RETURNS.flags.writeable = False


@dataclass(frozen=True, slots=True)
class Sample:
    """One branch, as the trainer gets it (field names as in miles).

    `tokens` is prompt + response; per-token columns cover the last `response_length` tokens.
    """

    tokens: TokenIds
    response_length: int
    loss_mask: npt.NDArray[np.uint8]
    """1 on tokens to train, else 0."""
    rollout_log_probs: Logprobs
    """Behavior logprobs; 0.0 where no token was sampled."""
    status: SampleStatus
    weight_versions: tuple[str, ...]
    """Version labels in sampling order, without consecutive repeats."""
    behavior_versions: npt.NDArray[np.int32]
    """Policy version that sampled each token, else -1."""
    proximal_logprobs: Logprobs
    proximal_versions: npt.NDArray[np.int32]
    repeat_terminated: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    reward: float | None = None
    index: int | None = None
    group_index: int | None = None
    weight: float = 1.0
    """Share of its rollout's trained tokens."""
    turn_rewards: tuple[float | None, ...] = ()
    """One per entry of `metadata["turns"]`; empty if no turn has one."""
    returns: npt.NDArray[np.float32] = field(default_factory=lambda: _NO_RETURNS)
    """Reward of the token's turn and later ones, else 0; [0] without `turn_rewards`."""
    turn_values: npt.NDArray[np.float32] = field(default_factory=lambda: _NO_RETURNS)
    """Value of the state before the token's turn, else NaN (`samples.turn_rewards`); [0] without forks."""
    routed_experts: SampleRows | None = None
    """Experts that each token was routed to, prompt included; None if not recorded."""
    sampling_mask: SampleMasks | None = None
    """Candidates of each response token; None if not recorded, or if every id was one."""
    teachers: Mapping[str, Logprobs] = field(default_factory=dict)
    """Logprobs of sampled tokens by each teacher; NaN where missing or not sampled."""
    teacher_tops: Mapping[str, TopLogprobs] = field(default_factory=dict)
    """Most likely tokens by each teacher with `top_k`, one row per response token."""

    def _repr_html_(self) -> str:
        facts = {
            "reward": self.reward,
            "turns": len(self.metadata.get("turns", ())) or None,
            "weight": self.weight,
            "sampled by": ", ".join(self.weight_versions) or None,
        }
        return card(f"Sample: {self.status}", facts, token_bar(token_kinds(self)))


def token_kinds(sample: Sample) -> list[str]:
    """Return what each token of `sample` is: `context`, `masked` or `trained`."""
    sampled = np.where(sample.behavior_versions < 0, "context", "masked")
    response = np.where(sample.loss_mask == 1, "trained", sampled)
    return ["context"] * (sample.tokens.size - sample.response_length) + [str(kind) for kind in response]


def end_of_turn(asked_at: float, ended_at: float, requests: Iterable[tuple[float | None, float]]) -> float:
    """Return the Unix seconds when a turn ended; `ended_at` is its first admission plus its seconds."""
    # The seconds of a continued turn omit the gaps between attempts; its requests do not.
    ends = [began_at + seconds for began_at, seconds in requests if began_at is not None]
    return max(ended_at, asked_at, *ends)


def as_ids(ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> TokenIds:
    """Return a read-only int32 array of `ids`."""
    if not isinstance(ids, np.ndarray):
        try:
            return np.frombuffer(struct.pack(f"{len(ids)}i", *ids), np.int32)  # numpy takes three times as long
        except struct.error as error:
            raise OverflowError(f"expected ids of 32 bits: {error}") from None
    array = np.asarray(ids, dtype=np.int32).view()
    array.flags.writeable = False
    return array


def as_logprobs(values: Sequence[float] | npt.NDArray[np.floating[Any]]) -> Logprobs:
    """Return a read-only float32 array of `values`."""
    array = np.asarray(values, dtype=np.float32).view()
    array.flags.writeable = False
    return array

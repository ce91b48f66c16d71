"""A session as a reader sees it: its turns, where their tokens went, and each token.

Its source is the session's record (`sessions.record`). Whatever a record lacks is empty or None here. Texts are as
recorded; renderers escape them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from harness.tokens.incremental import IncrementalDecoder
from harness.tokens.tokenizer import Tokenizer
from harness.types import Json, Message, TurnNotes

TRAINED = "trained"
MASKED = "masked"

_CONTEXT = 8  # ids before an output that its first ids are decoded behind


class TokenView(NamedTuple):
    position: int
    """Index in the turn's output."""
    token_id: int
    text: str | None
    """Characters completed by this token; None without a tokenizer or if it lacks the id."""
    logprob: float | None
    version: str | None
    fate: str
    """`trained`, `masked`, or the reason that it is in no sample."""


@dataclass(frozen=True, slots=True)
class TurnView:
    """A model call."""

    index: int
    parent: int | None
    status: str
    end: str
    error: Json | None
    """`code`, `cause` and `message` of an error that ended it or contributed."""
    prompt_length: int
    output_length: int
    fate: str
    """`trained` for a turn in a sample, `masked` if nothing is trained, or the reason that it is in none."""
    fates: Mapping[str, int]
    """Sampled tokens by fate, including discarded ones."""
    unknown: int
    """Most tokens that engines can have sampled beyond that without delivering them."""
    versions: Sequence[Json]
    """`version`, `start`, `end` of each part of the output."""
    messages: Sequence[Message]
    """Messages of the request that the parent does not have."""
    reply: Message
    attempts: int
    delivered: bool
    seconds: float
    created_at: float
    requests: Sequence[Json] = ()
    """Engine requests: `request_id`, `start`, `end`, and if known `began_at`, `seconds`, `queued_s`, `worker`."""
    held_s: float = 0.0
    """Part of `seconds` at the gate."""
    held_before_s: float = 0.0
    """Seconds at the gate before `created_at`."""
    traceparent: str | None = None
    """The agent's own span of the call."""
    context_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    masked_from: int = 0
    role: str = "main"
    """The call's role in its session, with its evidence (`samples.roles`)."""
    evidence: str = ""
    inherited: str = ""
    """`trained` or `masked` for a turn of an earlier session, else empty."""
    asked_again: bool = False
    """The agent repeated the call of an inherited turn."""
    asked: Json = field(default_factory=dict)
    """Sampling parameters of the client's request."""
    toolset: str = ""
    """Digest of a root's tools."""
    tools: Sequence[Json] = ()
    """A root's tools, unless an earlier root has the same."""

    @classmethod
    def of(cls, turn: Json) -> Self:
        notes = TurnNotes.from_json(turn.get("notes") or {})
        output_length = int(turn.get("output_length", 0))
        masked_from = int(turn.get("masked_from", output_length))
        fate = turn.get("dropped") or (MASKED if output_length and not masked_from else TRAINED)
        counts: dict[str, int] = {}
        if fate in (TRAINED, MASKED):
            counts |= {TRAINED: masked_from, MASKED: output_length - masked_from}
        else:
            counts[fate] = output_length
        for each in turn.get("discarded", ()):
            counts[each["reason"]] = counts.get(each["reason"], 0) + int(each["tokens"])
        return cls(
            index=turn["turn"],
            parent=turn["parent"],
            status=turn["status"],
            end=turn.get("end", "unknown"),
            error=notes.error or None,
            prompt_length=turn.get("prompt_length", 0),
            output_length=output_length,
            fate=fate,
            fates={name: count for name, count in counts.items() if count},
            unknown=sum(int(each["at_most"]) for each in turn.get("unknown", ())),
            versions=turn.get("weight_versions", ()),
            messages=turn.get("messages_delta", ()),
            reply=turn.get("reply") or {},
            attempts=notes.attempts,
            delivered=bool(turn.get("delivered")),
            seconds=float(turn.get("seconds", 0.0)),
            created_at=float(turn.get("created_at", 0.0)),
            requests=turn.get("segments", ()),
            held_s=notes.held_s,
            held_before_s=notes.held_before_s,
            traceparent=notes.client.get("traceparent"),
            context_ids=turn.get("context_ids", ()),
            output_ids=turn.get("output_ids", ()),
            logprobs=turn.get("logprobs", ()),
            masked_from=masked_from,
            role=turn.get("role", "main"),
            evidence=turn.get("evidence", ""),
            inherited=notes.inherited,
            asked_again=notes.asked_again,
            asked=turn.get("sampling", {}).get("asked") or {},
            toolset=notes.toolset,
            tools=notes.tool_definitions,
        )

    def tokens(self, tokenizer: Tokenizer | None) -> Iterator[TokenView]:
        """Yield every sampled token; none if the record has no token columns."""
        decoder = None if tokenizer is None else IncrementalDecoder(tokenizer.decode, tokenizer.byte_ids)
        if decoder is not None:
            decoder.push(self.context_ids[-_CONTEXT:])
        versions = iter(self.versions)
        span: Mapping[str, Any] | None = next(versions, None)
        last = len(self.output_ids) - 1
        for position, token_id in enumerate(self.output_ids):
            while span is not None and position >= span["end"]:
                span = next(versions, None)
            text = None
            if tokenizer is not None and decoder is not None and token_id in tokenizer:
                text = decoder.push([token_id]) + (decoder.end() if position == last else "")
            logprob = self.logprobs[position] if position < len(self.logprobs) else None
            fate = self.fate
            if fate in (TRAINED, MASKED):
                fate = TRAINED if position < self.masked_from else MASKED
            yield TokenView(position, token_id, text, logprob, None if span is None else span["version"], fate)


def unknown_ids(turns: Iterable[TurnView], tokenizer: Tokenizer | None) -> Iterator[str]:
    """Yield a sentence about ids that the tokenizer lacks."""
    ids = {each for turn in turns for each in turn.output_ids} if tokenizer is not None else set()
    lacked = sorted(each for each in ids if tokenizer is not None and each not in tokenizer)
    if lacked:
        more = f", nor are {len(lacked) - 1} others" if len(lacked) > 1 else ""
        yield f"the text of tokens: id {lacked[0]} is not in this tokenizer{more}"


@dataclass(frozen=True, slots=True)
class SessionView:
    """A session with its turns, in order of admission."""

    session_id: str
    phase: str
    turns: Sequence[TurnView]
    turns_in_flight: int
    refusals: Mapping[str, int]
    """Error answers to model calls, by code."""
    ledger: Json
    metadata: Json = field(default_factory=dict)
    remarks: Sequence[str] = ()
    """Notes for the session's owner about its samples."""
    inherits: Json | None = None
    """Earlier session, and where and why this one left its record (`sessions.inheritance`)."""

    @classmethod
    def of(cls, record: Json) -> Self:
        return cls(
            session_id=record["session_id"],
            phase=record["phase"],
            turns=[TurnView.of(turn) for turn in record["turns"]],
            turns_in_flight=int(record.get("turns_in_flight", 0)),
            refusals=record.get("refusals") or {},
            remarks=record.get("remarks") or (),
            ledger=record.get("ledger") or {},
            metadata=record.get("metadata") or {},
            inherits=record.get("inherits"),
        )

    def walk(self) -> Iterator[tuple[TurnView, int]]:
        """Yield the turns as a tree, each after its parent, with the number of forks above it."""
        children: dict[int | None, list[TurnView]] = {}
        for turn in self.turns:
            children.setdefault(turn.parent, []).append(turn)
        waiting = [(turn, int(len(children[None]) > 1)) for turn in reversed(children.get(None, ()))]
        while waiting:
            turn, depth = waiting.pop()
            yield turn, depth
            # A turn is listed once, even if a damaged record repeats parents.
            below = children.pop(turn.index, [])
            waiting += [(child, depth + (len(below) > 1)) for child in reversed(below)]

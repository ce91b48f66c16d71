"""Inheritance: a session begins with the record of an earlier one, to resume or fork its rollout.

A restarted agent repeats its calls. Each repeated call gets its recorded answer, without the engine
(`Session.find_inherited`); one that differs is sampled, as a branch on inherited tokens. Turns are copied and the
earlier record never changes. Their tokens keep ids, logprobs and versions, and `generated` does not count them again.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import StrEnum
from types import MappingProxyType

from msgspec import structs

from harness.errors import MalformedRequest
from harness.samples.proximal import oldest_version
from harness.sessions.admission import Limits, is_too_old
from harness.sessions.divergence import Divergence, find_divergence
from harness.sessions.edits import place_edits
from harness.sessions.lifecycle import CloseReason
from harness.sessions.session import Session
from harness.sessions.session_config import Inheritance, SessionConfig
from harness.tokens.matching import EXACT, NormalForm
from harness.turn_ends import TurnStatus
from harness.types import INHERITED_MASKED, INHERITED_TRAINED, Json, Turn


class InheritanceEnd(StrEnum):
    """Reason why a session left its inherited record."""

    RECORD = "record"
    """The record has no further answer there."""
    FORK = "fork"
    """The fork resamples this turn."""
    DIFFERENCE = "difference"
    """A message differs."""
    TOOLS = "tools"
    """Tools or template variables differ."""
    SAMPLING = "sampling"
    """The client's sampling fields differ."""
    AGENT = "agent"
    """The agent ended without asking for the rest."""


def heir_config(previous: Session, config: SessionConfig, inherits: Inheritance) -> SessionConfig:
    """Return `config` with what `previous` passes on. Raise `MalformedRequest`."""
    if previous.closed_because is CloseReason.TAKEN_OVER:
        raise _refusal("a session with turns of its own, a successor (`resumes`) took this one's")
    if previous.is_open or previous.turns_in_flight:
        raise _refusal("a session that was ended or closed, this one still lives; end it first")
    _require_forkable(previous, inherits.before)
    if config.matching not in ((), previous.config.matching):
        raise MalformedRequest(
            f"matching: expected none, which keeps the earlier session's, or {list(previous.config.matching)}",
            param="matching",
        )
    if config.script not in (None, previous.config.script):
        raise MalformedRequest("script: expected the earlier session's, or none, which keeps it", param="script")
    if config.record not in ((), previous.config.record):
        raise MalformedRequest("record: expected the earlier session's, or none", param="record")
    return replace(
        config,
        metadata={**previous.config.metadata, **config.metadata},
        matching=previous.config.matching,
        script=previous.config.script,
        record=previous.config.record,
        inherits=place_edits(previous, inherits),
    )


def turns_to_inherit(previous: Session, inherits: Inheritance, limits: Limits, live: int | None) -> list[Turn]:
    """Return copies of the turns that a session with `limits` can repeat under weight version `live`.

    Turns too old for `limits` are left out with their descendants. Raise `MalformedRequest` if the heir is strict.
    """
    note = INHERITED_TRAINED if inherits.trained else INHERITED_MASKED
    kept: dict[int, Turn] = {}
    for turn in previous.turns:
        parent = None if turn.parent is None else kept.get(turn.parent)
        goes_on = turn.parent is None or (parent is not None and parent.status is TurnStatus.COMPLETED)
        is_answer = turn.status in (TurnStatus.COMPLETED, TurnStatus.TRUNCATED)
        if not goes_on or not is_answer or (inherits.before is not None and turn.index >= inherits.before):
            continue
        oldest = oldest_version(turn.version_spans)
        if live is not None and is_too_old(limits, oldest, live):
            if inherits.strict:
                expected = f"tokens within limits.staleness {limits.staleness} of weight version {live}"
                raise _refusal(f"{expected}, turn {turn.index} has version {oldest}")
            continue  # its descendants are left out, too
        # What a fork must not train, its own heirs must not train either.
        kind = turn.notes.inherited if turn.notes.inherited == INHERITED_MASKED else note
        notes = structs.replace(turn.notes, inherited=kind, asked_again=False)
        kept[turn.index] = structs.replace(turn, delivered=False, notes=notes)
    return list(kept.values())


def inheritance_record(session: Session) -> Json | None:
    """Return where a session's turns come from, and where and why it left that record; None if it has no record."""
    inherits = session.config.inherits
    if inherits is None:
        return None
    taken = [turn for turn in session.turns if turn.notes.inherited]
    first = next((turn for turn in session.turns if not turn.notes.inherited), None)
    left = [turn for turn in taken if not turn.notes.asked_again]
    end = None if first is None else _end_at(first, inherits)
    if first is None and left and not session.is_open:
        end = InheritanceEnd.AGENT
    return {
        **inherits.to_json(),
        "turns": len(taken),
        "asked_again": len(taken) - len(left),
        "ended_at": None if first is None else first.index,
        "because": end,
        "difference": (first and first.notes.diverged) or None,
    }


def find_drift(
    record: Json, turn: int, fork: Json, edits: Mapping[int, str] = MappingProxyType({}), form: NormalForm = EXACT
) -> Divergence | InheritanceEnd | None:
    """Return how the first own turn of `fork` differs from `turn` of the forked `record`; None if it does not."""
    inherits = fork["inherits"]
    if inherits is None or inherits["ended_at"] is None:
        return InheritanceEnd.AGENT
    turns = {each["turn"]: each for each in record["turns"]}
    recorded, own = turns[turn], next(each for each in fork["turns"] if each["turn"] == inherits["ended_at"])
    first, parent = 0, recorded["parent"]
    while parent is not None:
        first += len(turns[parent]["messages_delta"]) + 1
        parent = turns[parent]["parent"]
    if (own["parent"], own["notes"].get("toolset")) != (recorded["parent"], recorded["notes"].get("toolset")):
        return InheritanceEnd(inherits["because"])
    messages = [
        {**message, "content": edits.get(number, message.get("content"))}
        for number, message in enumerate(recorded["messages_delta"], start=first)
    ]
    return find_divergence(messages, own["messages_delta"], first, form)


def _end_at(first: Turn, inherits: Inheritance) -> InheritanceEnd:
    if not first.notes.diverged:
        return InheritanceEnd.RECORD if inherits.before is None else InheritanceEnd.FORK
    match first.notes.diverged["field"]:
        case InheritanceEnd.TOOLS | InheritanceEnd.SAMPLING as field:
            return InheritanceEnd(field)
        case _:
            return InheritanceEnd.DIFFERENCE


def require_one_heir(held: Iterable[Session], stored: str | None, inherits: Inheritance) -> None:
    """Raise `MalformedRequest` if a session in memory, or the `stored` one, trains the same record."""
    of_held = ((each.session_id, each.config.inherits) for each in held)
    rivals = (heir for heir, its in of_held if its and its.trained and its.session_id == inherits.session_id)
    rival = next(rivals, stored) if inherits.trained else None
    if rival is not None:
        raise _refusal(f"a record without an heir, session {rival} continued with this one; inherit from that one")


def _require_forkable(previous: Session, before: int | None) -> None:
    if before is None:
        return
    turns = {turn.index: turn for turn in previous.turns}
    if before not in turns:
        raise _refusal(f"a turn of that session, which has {len(turns)}; there is no turn {before}", "before")
    role = previous.plan().roles[before].role
    if not previous.plan().is_trained(turns[before]):
        raise _refusal(f"a trained turn; turn {before} is {role}, which is never trained", "before")


def _refusal(expected: str, field: str = "session_id") -> MalformedRequest:
    return MalformedRequest(f"inherits.{field}: expected {expected}", param=f"inherits.{field}")

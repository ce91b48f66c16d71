"""JSON forms of a session, for `GET /sessions/{id}` and tools."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from heapq import nsmallest
from typing import NamedTuple

from harness.samples.delivery import DeliveryPlan
from harness.samples.roles import Role
from harness.sessions.divergence import explain_roots
from harness.sessions.inheritance import inheritance_record
from harness.sessions.ledger import DropReason, Ledger, find_dispositions
from harness.sessions.paging import SessionStub
from harness.sessions.session import Session
from harness.types import Json, Turn

# Fits into a request's head several times over.
MOST_ASKED_IDS = 100

IN_FLIGHT = "in_flight"
"""Status without an outcome."""


class RecordIds(StrEnum):
    """Token columns of a record."""

    DELTAS = "deltas"
    """`context_ids`, `output_ids`, `logprobs`: linear."""
    PROMPTS = "prompts"
    """`prompt_ids` in place of `context_ids`: turns times length."""
    NONE = "none"


def session_record(session: Session, ids: RecordIds = RecordIds.DELTAS, since: int = 0) -> Json:
    """Return a record; turns before `since` have only what can change."""
    plan = session.plan()
    dispositions = find_dispositions(session.turns, plan)
    return {
        "session_id": session.session_id,
        "phase": str(session.phase),
        "metadata": dict(session.config.metadata),
        "inherits": inheritance_record(session),
        "turns": [
            _standing_record(turn, plan, dispositions[turn.index])
            | (_turn_record(session, turn, ids) if turn.index >= since else {})
            for turn in session.turns
        ],
        "turns_in_flight": len(session.turns_in_flight),
        "refusals": dict(session.refusals),
        "ledger": session.ledger().to_json(),
        "remarks": list(_remarks(session, plan)),
    }


def _remarks(session: Session, plan: DeliveryPlan) -> Iterator[str]:
    main = {index for index, call in plan.roles.items() if call.role is Role.MAIN}
    if split := explain_roots(session.turns, main):
        yield split
    strays = [turn for turn in session.turns if plan.roles[turn.index].role is Role.STRAY]
    if strays:
        tokens = sum(turn.output_ids.size for turn in strays)
        yield f"{len(strays)} stray calls, {tokens} tokens, never trained: {plan.roles[strays[0].index].evidence}"


def session_facts(session: Session) -> Json:
    """Return what decides a rollout's outcome."""
    return {
        "session_id": session.session_id,
        "phase": str(session.phase),
        "turns": dict(Counter(str(turn.status) for turn in session.turns)),
        "turns_in_flight": len(session.turns_in_flight),
        "refusals": dict(session.refusals),
    }


def session_times(session: Session, since: int = 0) -> list[tuple[int, float, float | None, str]]:
    """Return index, admission (Unix seconds), seconds and status of turns."""
    # Earlier turns that were continued are included: the caller may have seen them end.
    in_flight = {each.index: each.admitted_at for each in session.turns_in_flight}
    recorded = [
        (turn.index, turn.created_at, turn.seconds, str(turn.status))
        for turn in session.turns
        if (turn.index >= since or turn.notes.attempts > 1) and turn.index not in in_flight
    ]
    return [*recorded, *((index, began_at, None, IN_FLIGHT) for index, began_at in in_flight.items())]


class SessionState(StrEnum):
    """State of a session: the first that fits any call."""

    HELD = "held"
    ENGINE = "engine"
    QUEUED = "queued"
    """A call is read, encoded, or waits for weights or a repeated turn."""
    TOOL = "tool"
    """The agent works between turns."""
    ENDED = "ended"


_BUSIEST = (SessionState.ENGINE, SessionState.HELD, SessionState.QUEUED, SessionState.TOOL, SessionState.ENDED)
_RANKS: Mapping[str, int] = {state: rank for rank, state in enumerate(_BUSIEST)}


class SessionStanding(NamedTuple):
    session: Session | SessionStub
    state: SessionState
    tokens: int
    """Sampled so far."""

    @property
    def order(self) -> tuple[int, int]:
        """Busiest state first, then most tokens."""
        return _RANKS[self.state], -self.tokens


def session_summary(standing: SessionStanding) -> Json:
    """Return a line for lists."""
    session, state, tokens = standing
    return {
        "session_id": session.session_id,
        "phase": str(session.phase),
        "state": str(state),
        "turns": session.turn_count if isinstance(session, SessionStub) else len(session.turns),
        "turns_in_flight": len(session.turns_in_flight),
        "tokens": tokens,
        "created_at": session.created_at,
    }


def busiest_summaries(summaries: Iterable[Json], limit: int) -> list[Json]:
    """Return the `limit` busiest."""
    return nsmallest(limit, summaries, key=lambda line: (_RANKS[line["state"]], -line["tokens"]))


def session_totals(standings: Iterable[SessionStanding], turns: int, tokens: int) -> Json:
    """Count sessions by state."""
    return {"states": dict(Counter(each.state for each in standings)), "turns": turns, "tokens": tokens}


def add_totals(totals: Iterable[Json]) -> Json:
    """Add totals of several servers."""
    states: Counter[str] = Counter()
    turns = tokens = 0
    for each in totals:
        states.update(each["states"])
        turns += each["turns"]
        tokens += each["tokens"]
    return {"states": dict(states), "turns": turns, "tokens": tokens}


def empty_record(session_id: str | None, phase: str | None = "unknown", metadata: Json | None = None) -> Json:
    """Return the record of an unknown or missing session."""
    # Collecting a deleted session must not crash a rollout.
    return {
        "session_id": session_id,
        "phase": phase,
        "metadata": metadata or {},
        "inherits": None,
        "turns": [],
        "turns_in_flight": 0,
        "refusals": {},
        "ledger": Ledger().to_json(),
        "remarks": [],
    }


def empty_facts(session_id: str) -> Json:
    """Return the facts of an unknown session."""
    return {"session_id": session_id, "phase": "unknown", "turns": {}, "turns_in_flight": 0, "refusals": {}}


def _standing_record(turn: Turn, plan: DeliveryPlan, dropped: DropReason | None) -> Json:
    role, evidence = plan.roles[turn.index]
    return {
        "turn": turn.index,
        "parent": turn.parent,
        "status": str(turn.status),
        "role": str(role),
        "evidence": evidence,
        "output_length": turn.output_ids.size,
        "masked_from": turn.masked_from if plan.is_trained(turn) else 0,
        "dropped": dropped,
        "delivered": turn.delivered,
        "seconds": turn.seconds,
    }


def _turn_record(session: Session, turn: Turn, ids: RecordIds) -> Json:
    columns: Json = {}
    if ids is RecordIds.PROMPTS:
        columns["prompt_ids"] = session.prompt_ids(turn).tolist()
    elif ids is RecordIds.DELTAS:
        columns["context_ids"] = turn.context_ids.tolist()
    if ids is not RecordIds.NONE:
        columns |= {"output_ids": turn.output_ids.tolist(), "logprobs": turn.logprobs.tolist()}
    return {
        "end": str(turn.end),
        "prompt_length": turn.prompt_length,
        **columns,
        "weight_versions": [
            {"version": span.version, "start": span.start, "end": span.end} for span in turn.version_spans
        ],
        "segments": [
            {
                "request_id": each.request_id,
                "start": each.start,
                "end": each.end,
                "finish_reason": str(each.finish_reason),
                "began_at": each.began_at,
                "seconds": each.seconds,
                "queued_s": each.queued_s,
                "worker": each.worker,
            }
            for each in turn.segments
        ],
        "discarded": [
            {"request_id": each.request_id, "tokens": each.tokens, "reason": each.reason} for each in turn.discarded
        ],
        "unknown": [
            {"request_id": each.request_id, "at_most": each.at_most, "reason": each.reason} for each in turn.unknown
        ],
        "messages_delta": list(turn.messages_delta),
        "reply": dict(turn.reply),
        "sampling": dict(turn.sampling),
        "created_at": turn.created_at,
        "script_step": turn.notes.script_step,
        "notes": turn.notes.to_json(),
    }

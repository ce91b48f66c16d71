"""A session as JSON: what `GET /sessions/{id}` answers and what tools read.

A turn's prompt is that of its parent, the parent's output and `context_ids`, so a record by deltas is as long as the
session is. Prompts that are written out make it as long as turns times length: only for whoever asks for that.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from heapq import nsmallest
from typing import NamedTuple

from harness.samples.delivery import DeliveryPlan
from harness.samples.roles import Role
from harness.sessions.divergence import explain_roots
from harness.sessions.ledger import DropReason, Ledger, find_dispositions
from harness.sessions.paging import SessionStub
from harness.sessions.session import Session
from harness.types import Json, Turn

MOST_ASKED_IDS = 100
"""Sessions that one request asks for by their ids: as many as fit into its head, several times over."""

IN_FLIGHT = "in_flight"
"""In the place of a status, of a turn that has none yet."""


class RecordIds(StrEnum):
    """Which columns of tokens a record has."""

    DELTAS = "deltas"
    """`context_ids`, `output_ids`, `logprobs` of every turn: linear."""
    PROMPTS = "prompts"
    """`prompt_ids` in the place of `context_ids`: grows with turns times length."""
    NONE = "none"
    """None of them: conversation, statuses, lengths and ledger."""


def session_record(session: Session, ids: RecordIds = RecordIds.DELTAS, since: int = 0) -> Json:
    """The record of a session and all its turns; of those before `since` what a later turn can change, and no more."""
    plan = session.plan()
    dispositions = find_dispositions(session.turns, plan)
    return {
        "session_id": session.session_id,
        "phase": str(session.phase),
        "metadata": dict(session.config.metadata),
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
    """What the owner of a session should know of its samples, a line each."""
    main = {index for index, call in plan.roles.items() if call.role is Role.MAIN}
    if split := explain_roots(session.turns, main):
        yield split
    strays = [turn for turn in session.turns if plan.roles[turn.index].role is Role.STRAY]
    if strays:
        tokens = sum(turn.output_ids.size for turn in strays)
        yield f"{len(strays)} stray calls, {tokens} tokens, never trained: {plan.roles[strays[0].index].evidence}"


def session_facts(session: Session) -> Json:
    """The facts that decide how a rollout ended, and whether it has: no conversation, no tokens."""
    return {
        "session_id": session.session_id,
        "phase": str(session.phase),
        "turns": dict(Counter(str(turn.status) for turn in session.turns)),
        "turns_in_flight": len(session.turns_in_flight),
        "refusals": dict(session.refusals),
    }


def session_times(session: Session, since: int = 0) -> list[tuple[int, float, float | None, str]]:
    """Index, admission (Unix seconds), seconds and status of turns; those in flight have no end.

    They are those from `since` on, and of earlier ones those that went on again: whoever asks may have seen them end.
    One that is in flight again is in it once.
    """
    in_flight = {each.index: each.admitted_at for each in session.turns_in_flight}
    recorded = [
        (turn.index, turn.created_at, turn.seconds, str(turn.status))
        for turn in session.turns
        if (turn.index >= since or turn.attempts > 1) and turn.index not in in_flight
    ]
    return [*recorded, *((index, began_at, None, IN_FLIGHT) for index, began_at in in_flight.items())]


class SessionState(StrEnum):
    """What a session waits for now; where it has several calls, the first of these that fits."""

    HELD = "held"
    """A call of it waits at the gate."""
    ENGINE = "engine"
    """An engine has a turn of it."""
    QUEUED = "queued"
    """A call of it is read, encoded, or waits for weights or for the turn that it repeats."""
    TOOL = "tool"
    """Its agent: a tool call, or whatever it does between two turns."""
    ENDED = "ended"
    """Nothing: it accepts no further turn."""


_BUSIEST = (SessionState.ENGINE, SessionState.HELD, SessionState.QUEUED, SessionState.TOOL, SessionState.ENDED)
_RANKS: Mapping[str, int] = {state: rank for rank, state in enumerate(_BUSIEST)}


class SessionStanding(NamedTuple):
    """A session at one moment."""

    session: Session | SessionStub
    state: SessionState
    tokens: int
    """Sampled for it, as far as they have come."""

    @property
    def order(self) -> tuple[int, int]:
        """Sorts by how busy sessions are: those in an engine first, then those that wait, each by their tokens."""
        return _RANKS[self.state], -self.tokens


def session_summary(standing: SessionStanding) -> Json:
    """A line about a session, for lists."""
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
    """So many of the lines, in the order of `SessionStanding`."""
    return nsmallest(limit, summaries, key=lambda line: (_RANKS[line["state"]], -line["tokens"]))


def session_totals(standings: Iterable[SessionStanding], turns: int, tokens: int) -> Json:
    """The sum: sessions by state; `turns` and `tokens` are those of the server since its start."""
    return {"states": dict(Counter(each.state for each in standings)), "turns": turns, "tokens": tokens}


def add_totals(totals: Iterable[Json]) -> Json:
    """The totals of several servers as those of one."""
    states: Counter[str] = Counter()
    turns = tokens = 0
    for each in totals:
        states.update(each["states"])
        turns += each["turns"]
        tokens += each["tokens"]
    return {"states": dict(states), "turns": turns, "tokens": tokens}


def empty_record(session_id: str | None, phase: str | None = "unknown", metadata: Json | None = None) -> Json:
    """The record of a session that was never seen or has been deleted: collecting it must not crash a rollout.

    A rollout without a session has one too, with no id, no phase and the `metadata` that it would have had.
    """
    return {
        "session_id": session_id,
        "phase": phase,
        "metadata": metadata or {},
        "turns": [],
        "turns_in_flight": 0,
        "refusals": {},
        "ledger": Ledger().to_json(),
        "remarks": [],
    }


def empty_facts(session_id: str) -> Json:
    """The facts of a session that was never seen or has been deleted."""
    return {"session_id": session_id, "phase": "unknown", "turns": {}, "turns_in_flight": 0, "refusals": {}}


def _standing_record(turn: Turn, plan: DeliveryPlan, dropped: DropReason | None) -> Json:
    """How a turn stands among those that came behind it."""
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
    """What no later turn changes."""
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
        "script_step": turn.script_step,
        "notes": dict(turn.notes),
    }

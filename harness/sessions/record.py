"""A session as JSON: what `GET /sessions/{id}` answers and what tools read."""

from harness.sessions.session import Session
from harness.types import Json, Turn


def session_record(session: Session) -> Json:
    """The whole record; prompts are written out in full, so its size grows with turns times length."""
    return {
        "session_id": session.session_id,
        "phase": str(session.phase),
        "metadata": dict(session.config.metadata),
        "turns": [_turn_record(session, turn) for turn in session.turns],
        "turns_in_flight": len(session.turns_in_flight),
        "refusals": dict(session.refusals),
        "ledger": session.ledger().to_json(),
    }


def session_summary(session: Session) -> Json:
    """A line about a session, for lists."""
    return {
        "session_id": session.session_id,
        "phase": str(session.phase),
        "turns": len(session.turns),
        "turns_in_flight": len(session.turns_in_flight),
        "created_at": session.created_at,
    }


def empty_record(session_id: str) -> Json:
    """The record of a session that was never seen or has been deleted: collecting it must not crash a rollout."""
    return {
        "session_id": session_id,
        "phase": "unknown",
        "metadata": {},
        "turns": [],
        "turns_in_flight": 0,
        "refusals": {},
        "ledger": {"generated": 0, "trained": 0, "masked": 0, "dropped": {}},
    }


def _turn_record(session: Session, turn: Turn) -> Json:
    return {
        "turn": turn.index,
        "parent": turn.parent,
        "status": str(turn.status),
        "finish_reason": turn.finish_reason,
        "prompt_ids": session.prompt_ids(turn).tolist(),
        "output_ids": turn.output_ids.tolist(),
        "logprobs": turn.logprobs.tolist(),
        "weight_versions": [
            {"version": span.version, "start": span.start, "end": span.end} for span in turn.version_spans
        ],
        "segments": [
            {
                "request_id": each.request_id,
                "start": each.start,
                "end": each.end,
                "finish_reason": str(each.finish_reason),
            }
            for each in turn.segments
        ],
        "discarded": [
            {"request_id": each.request_id, "tokens": each.tokens, "reason": each.reason} for each in turn.discarded
        ],
        "messages_delta": list(turn.messages_delta),
        "reply": dict(turn.reply),
        "sampling": dict(turn.sampling),
        "delivered": turn.delivered,
        "created_at": turn.created_at,
        "seconds": turn.seconds,
        "notes": dict(turn.notes),
    }

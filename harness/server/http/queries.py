"""Query parameters of session requests. Unknown ones are ignored; wrong ones raise `MalformedRequest`."""

import math
from typing import NamedTuple

from starlette.datastructures import QueryParams

from harness.errors import MalformedRequest
from harness.sessions.lifecycle import RolloutEnd
from harness.sessions.record import MOST_ASKED_IDS

_LIMIT_DIGITS = 10
_OUTCOME_LENGTH = 40


class ListRequest(NamedTuple):
    limit: int | None
    """Number of sessions, busiest first; None for all."""
    ids: list[str] | None
    """Only these ids; None for all."""


def parse_list(query: QueryParams) -> ListRequest:
    """Parse `?limit=N&id=ID&id=ID`."""
    limit, ids = query.get("limit"), query.getlist("id")
    if limit is not None and not (limit.isascii() and limit.isdigit() and 0 < len(limit) < _LIMIT_DIGITS):
        raise MalformedRequest(f"limit: expected a number of sessions, got {limit[:64]!r}", param="limit")
    if len(ids) > MOST_ASKED_IDS:
        raise MalformedRequest(f"id: expected at most {MOST_ASKED_IDS}, got {len(ids)}", param="id")
    return ListRequest(None if limit is None else int(limit), ids or None)


def parse_since(query: QueryParams) -> float:
    """Parse `?since=T` (Unix time, default 0)."""
    return _read_number("since", "Unix seconds", query.get("since", "0"))


def parse_end_of_rollout(query: QueryParams) -> RolloutEnd | None:
    """Parse `?outcome=WORD&reason=TEXT&reward=NUMBER`, or return None without an outcome."""
    outcome, reward = query.get("outcome", ""), query.get("reward")
    if len(outcome) > _OUTCOME_LENGTH:
        raise MalformedRequest(f"outcome: expected a word, got {len(outcome)} characters", param="outcome")
    number = None if reward is None else _read_number("reward", "a number", reward)
    return RolloutEnd(outcome, query.get("reason", ""), number) if outcome else None


def parse_first_turn(query: QueryParams) -> int:
    """Parse `?since=N` (turn index, default 0)."""
    return _read_turn("since", query.get("since", "0"))


def parse_times(query: QueryParams) -> dict[str, int]:
    """Parse `?from=ID:N&from=ID:N` into the first turn by session."""
    asked = query.getlist("from")
    if len(asked) > MOST_ASKED_IDS:
        raise MalformedRequest(f"from: expected at most {MOST_ASKED_IDS}, got {len(asked)}", param="from")
    parts = [each.rpartition(":") for each in asked]
    return {session_id: _read_turn("from", turn) for session_id, _, turn in parts}


def _read_number(param: str, what: str, said: str) -> float:
    try:
        number = float(said)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or not said.isascii() or "_" in said:  # Python alone accepts these
        raise MalformedRequest(f"{param}: expected {what}, got {said[:64]!r}", param=param)
    return number


def _read_turn(param: str, said: str) -> int:
    if not (said.isascii() and said.isdigit() and len(said) < _LIMIT_DIGITS):
        raise MalformedRequest(f"{param}: expected the index of a turn, got {said[:64]!r}", param=param)
    return int(said)

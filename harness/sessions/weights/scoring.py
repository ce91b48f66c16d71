"""Scoring requests for tokens that wait for the live version (I7), by branch; a shared prefix is scored once."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from harness.samples.proximal import waiting_tokens, waiting_window
from harness.sessions.session import IsComparable, Session
from harness.turn_ends import TurnStatus
from harness.types import TokenIds, Turn, as_ids


class ScoringTask(NamedTuple):
    """Engine request to score `input_ids[start:]`."""

    leaf: int
    input_ids: TokenIds
    """Up to the last waiting token, or the engine's limit."""
    start: int


class Waiting(NamedTuple):
    tokens: int
    incomparable: int
    """Additional tokens that the engine cannot score."""


NOTHING_WAITING = Waiting(0, 0)


def next_scoring(
    session: Session, version: int, is_comparable: IsComparable, longest: int, given_up: Collection[int] = ()
) -> ScoringTask | None:
    """Return the next scoring of at most `longest` ids; skip branches whose leaf is in `given_up`."""
    for branch in scored_branches(session):
        if branch[-1].index in given_up:
            continue
        window = waiting_window(filter(is_comparable, without_in_flight(session, branch)), version)
        if window is not None and window.start < longest:
            ids = np.concatenate([part for turn in branch for part in (turn.context_ids, turn.output_ids)])
            return ScoringTask(branch[-1].index, as_ids(ids[: min(window.stop, longest)]), window.start)
    return None


def count_waiting(session: Session, version: int, is_comparable: IsComparable) -> Waiting:
    comparable: list[Turn] = []
    others: list[Turn] = []
    for turn in waiting_turns(session, version):
        (comparable if is_comparable(turn) else others).append(turn)
    return Waiting(waiting_tokens(comparable, version), waiting_tokens(others, version))


def waiting_turns(session: Session, version: int) -> list[Turn]:
    candidates = session.waiting_for(version)
    if not candidates:
        return []
    if session.is_open:
        usable = [turn for turn in map(session.turn, candidates) if turn.status is not TurnStatus.FAILED]
        return without_in_flight(session, usable)
    turns = {turn.index: turn for branch in scored_branches(session) for turn in branch if turn.index in candidates}
    return without_in_flight(session, turns.values())


def scored_branches(session: Session) -> Iterator[Sequence[Turn]]:
    """Return the branches whose tokens may be trained."""
    if not session.is_open:
        yield from (session.branch(branch.kept[-1].index) for branch in session.plan().delivered)
        return
    # An open session may continue any branch.
    usable = [turn for turn in session.turns if turn.status is not TurnStatus.FAILED]
    parents = {turn.parent for turn in usable}
    yield from (session.branch(turn.index) for turn in usable if turn.index not in parents)


def without_in_flight(session: Session, branch: Iterable[Turn]) -> list[Turn]:
    """Return the turns whose outcome is recorded."""
    # Their next outcome is on its way to the store; the request that continues them scores them.
    in_flight = {admission.index for admission in session.turns_in_flight}
    return [turn for turn in branch if turn.index not in in_flight]

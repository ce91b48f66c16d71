"""The tokens of a session that still wait for the policy version that is live, request by request (I7).

A scoring covers one branch. Branches share turns: after a scoring has been taken in, the next one asks only for what is
still missing, so a shared prefix is scored once. Turns in flight are left out: the request that goes on with them
scores them.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from harness.samples.proximal import waiting_tokens, waiting_window
from harness.sessions.session import IsComparable, Session
from harness.turn_ends import TurnStatus
from harness.types import TokenIds, Turn, as_ids


class ScoringTask(NamedTuple):
    """One request to the engine: score `input_ids[start:]`."""

    leaf: int
    """Index of the turn that ends the branch."""
    input_ids: TokenIds
    """The branch up to the last token that waits, or as much of it as an engine reads."""
    start: int


class Waiting(NamedTuple):
    """Tokens of a session that wait for a version."""

    tokens: int
    incomparable: int
    """Beside them: sampled on a scale on which the engine cannot score."""


NOTHING_WAITING = Waiting(0, 0)


def next_scoring(
    session: Session, version: int, is_comparable: IsComparable, longest: int, given_up: Collection[int] = ()
) -> ScoringTask | None:
    """The next scoring under `version`, in at most `longest` ids; None when no token within them waits for it.

    Branches whose leaf is in `given_up` are passed over.
    """
    for branch in _branches(session):
        if branch[-1].index in given_up:
            continue
        window = waiting_window(filter(is_comparable, _without_in_flight(session, branch)), version)
        if window is not None and window.start < longest:
            ids = np.concatenate([part for turn in branch for part in (turn.context_ids, turn.output_ids)])
            return ScoringTask(branch[-1].index, as_ids(ids[: min(window.stop, longest)]), window.start)
    return None


def count_waiting(session: Session, version: int, is_comparable: IsComparable) -> Waiting:
    """How many tokens of the session wait for `version`, and how many cannot be scored."""
    comparable: list[Turn] = []
    others: list[Turn] = []
    for turn in waiting_turns(session, version):
        (comparable if is_comparable(turn) else others).append(turn)
    return Waiting(waiting_tokens(comparable, version), waiting_tokens(others, version))


def waiting_turns(session: Session, version: int) -> list[Turn]:
    """The turns that may have tokens that wait for `version`; none costs nothing."""
    candidates = session.waiting_for(version)
    if not candidates:
        return []
    if session.is_open:
        usable = [turn for turn in map(session.turn, candidates) if turn.status is not TurnStatus.FAILED]
        return _without_in_flight(session, usable)
    turns = {turn.index: turn for branch in _branches(session) for turn in branch if turn.index in candidates}
    return _without_in_flight(session, turns.values())


def _branches(session: Session) -> Iterator[Sequence[Turn]]:
    """Branches whose tokens may still be delivered: of a session that may go on, all of them."""
    if not session.is_open:
        yield from (branch.kept for branch in session.plan().delivered)
        return
    usable = [turn for turn in session.turns if turn.status is not TurnStatus.FAILED]
    parents = {turn.parent for turn in usable}
    yield from (session.branch(turn.index) for turn in usable if turn.index not in parents)


def _without_in_flight(session: Session, branch: Iterable[Turn]) -> list[Turn]:
    """The turns of `branch` that nobody works on; another outcome of the others is on its way to the store."""
    in_flight = {admission.index for admission in session.turns_in_flight}
    return [turn for turn in branch if turn.index not in in_flight]

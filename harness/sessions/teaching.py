"""Teachers' logprobs: which tokens a teacher scores next, and what a turn keeps of it.

A turn is scored at most once, under one version of the teacher's weights; branches share its scores. A token without a
score stays missing.
"""

from collections.abc import Collection, Iterable, Sequence

import numpy as np
from msgspec import structs

from harness.errors import EngineReplyInvalid
from harness.sessions.session import Session
from harness.sessions.weights.scoring import ScoringTask, scored_branches, without_in_flight
from harness.turn_ends import TurnStatus
from harness.types import PromptLogprobs, TeacherScores, TokenIds, Turn, as_ids, as_logprobs

_ROUNDING = 1e-3  # by which a certain token's logprob may exceed 0


def next_teaching(session: Session, name: str, longest: int, given_up: Collection[int] = ()) -> ScoringTask | None:
    """Return the next scoring of at most `longest` ids by teacher `name`; skip branches whose leaf is in `given_up`."""
    if name not in (session.config.teachers or ()):
        return None
    for branch in scored_branches(session):
        turns = [turn for turn in untaught(session, branch, name) if _end(turn) <= longest]
        if turns and branch[-1].index not in given_up:
            ids = np.concatenate([part for turn in branch for part in (turn.context_ids, turn.output_ids)])
            return ScoringTask(branch[-1].index, as_ids(ids[: _end(turns[-1])]), turns[0].prompt_length)
    return None


def count_untaught(session: Session, name: str) -> int:
    """Count the tokens that teacher `name` has not scored."""
    turns = {turn.index: turn for branch in scored_branches(session) for turn in untaught(session, branch, name)}
    return sum(int(turn.output_ids.size) for turn in turns.values())


def teach(session: Session, name: str, task: ScoringTask, scoring: PromptLogprobs, top_k: int = 0) -> list[Turn]:
    """Apply the answer to `task`; return changed turns. Raise `EngineReplyInvalid` before any change."""
    check_scores(name, task.input_ids, task.start, scoring)
    _check_top(name, scoring, top_k)
    changed = []
    for turn in untaught(session, session.branch(task.leaf), name):
        if task.start <= turn.prompt_length and np.array_equal(
            task.input_ids[turn.prompt_length : _end(turn)], turn.output_ids
        ):
            start, end = turn.prompt_length - task.start, _end(turn) - task.start
            top = None if scoring.top is None else scoring.top.part(start, end)
            scores = TeacherScores(scoring.version, as_logprobs(np.minimum(scoring.logprobs[start:end], 0.0)), top)
            changed.append(structs.replace(turn, teachers={**turn.teachers, name: scores}))
    session.replace_turns(changed)
    return changed


def check_scores(name: str, input_ids: TokenIds, start: int, scoring: PromptLogprobs) -> None:
    """Raise `EngineReplyInvalid` unless `scoring` has the logprobs of `input_ids[start:]`."""
    expected = int(input_ids.size) - start
    if (scoring.start, scoring.logprobs.size) != (start, expected):
        raise EngineReplyInvalid(
            f"teacher {name}: expected {expected} logprobs from position {start},"
            f" got {scoring.logprobs.size} from {scoring.start}"
        )
    wrong = ~np.isfinite(scoring.logprobs) | (scoring.logprobs > _ROUNDING)
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise EngineReplyInvalid(
            f"teacher {name}: expected logprobs of at most 0, got {scoring.logprobs[at]} at position {start + at}"
        )


def _check_top(name: str, scoring: PromptLogprobs, top_k: int) -> None:
    top, shape = scoring.top, (scoring.logprobs.size, top_k)
    if top_k and (
        top is None
        or not top.ids.shape == top.logprobs.shape == shape
        or (top.ids < 0).any()
        or not np.isfinite(top.logprobs).all()
        or (top.logprobs > _ROUNDING).any()
    ):
        raise EngineReplyInvalid(f"teacher {name}: expected {top_k} ids per position, with logprobs of at most 0")


def untaught(session: Session, branch: Iterable[Turn], name: str) -> Sequence[Turn]:
    """Return the turns of `branch` that teacher `name` has not scored and that change no more."""
    return [
        turn
        for turn in without_in_flight(session, branch)
        if turn.output_ids.size
        and name not in turn.teachers
        # While the session is open, a retry may continue an aborted turn, or begin it again.
        and not (session.is_open and turn.status is TurnStatus.ABORTED)
    ]


def _end(turn: Turn) -> int:
    return turn.prompt_length + int(turn.output_ids.size)

"""Teachers' logprobs: which tokens a teacher scores next, and what a turn keeps of it.

A turn is scored at most once, under one version of the teacher's weights; branches share its scores. A token without a
score stays missing. A teacher with another tokenizer reads the conversation in its own template. A chunk's tokens share
its logprob in proportion to their behavior logprobs: a token of which the policy was certain gets no blame.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import structs

from harness.errors import EngineReplyInvalid, MalformedRequest
from harness.sessions.session import Session
from harness.sessions.weights.scoring import scored_branches, without_in_flight
from harness.tokens.chat_tokenizer import ChatTokenizer
from harness.tokens.incremental import REPLACEMENT, Chunk, Spelled, align
from harness.turn_ends import TurnStatus
from harness.types import Json, Logprobs, Message, PromptLogprobs, TeacherScores, TokenIds, Turn, as_ids, as_logprobs

_ROUNDING = 1e-3  # by which a certain token's logprob may exceed 0
_PLAIN: Sequence[Message] = ({"role": "user", "content": "Hello."},)
_HEADER = 8  # ids that hold the beginning of an answer
_OPENS_REASONING = re.compile(r"<(think|thinking|thought|reasoning)>\s*$")


class TeachingTask(NamedTuple):
    """Engine request to score `input_ids[start:]`: a branch, or a turn's text in ids of the teacher's."""

    leaf: int
    input_ids: TokenIds
    start: int
    output_ids: TokenIds | None = None
    """Own ids of that text."""
    chunks: Sequence[Chunk] = ()
    """Pieces with a counterpart; `other` counts from `start`."""


class ReadTurn(NamedTuple):
    turn: Turn
    messages: Sequence[Message]
    tools: Sequence[Json]


def next_teaching(session: Session, name: str, longest: int, given_up: Collection[int] = ()) -> TeachingTask | None:
    """Return the next scoring of at most `longest` ids by teacher `name`; skip branches whose leaf is in `given_up`."""
    for branch in scored_branches(session):
        turns = [turn for turn in untaught(session, branch, name) if _end(turn) <= longest]
        if turns and branch[-1].index not in given_up:
            ids = np.concatenate([part for turn in branch for part in (turn.context_ids, turn.output_ids)])
            return TeachingTask(branch[-1].index, as_ids(ids[: _end(turns[-1])]), turns[0].prompt_length)
    return None


def next_said(session: Session, name: str, given_up: Collection[int]) -> ReadTurn | None:
    """Return the next turn whose text teacher `name` scores; skip those in `given_up`."""
    for branch in scored_branches(session):
        for turn in untaught(session, branch, name):
            if turn.index not in given_up:
                before = branch[: [each.index for each in branch].index(turn.index)]
                earlier = [message for each in before for message in (*each.messages_delta, each.reply)]
                toolset = branch[0].notes.toolset
                tools = [each.notes.tool_definitions for each in session.turns if each.notes.toolset == toolset]
                return ReadTurn(turn, [*earlier, *turn.messages_delta], next(filter(None, tools), ()))
    return None


def read_aligned(said: ReadTurn, chat: ChatTokenizer, teacher: ChatTokenizer) -> TeachingTask | None:
    """Write a turn in the teacher's ids, slowly; None if its template or tokenizer cannot."""
    turn, own, other = said.turn, chat.tokenizer, teacher.tokenizer
    if not _begins_alike(turn, chat, teacher):
        return None
    ids = turn.output_ids.tolist()
    end_id = teacher.end_of_turn_id if ids[-1] in own.eos_ids else None
    spelled = Spelled.of(own, ids[:-1] if ids[-1] in own.eos_ids else ids)
    theirs = Spelled.of(other, other.encode(spelled.text))
    unknown = (REPLACEMENT, *(marker for marker in own.markers if marker not in other.added_tokens))
    chunks = [chunk for chunk in align(spelled, theirs) if not any(text in chunk.text for text in unknown)]
    output = [*theirs.ids]
    if end_id is not None:
        chunks.append(Chunk(slice(len(ids) - 1, len(ids)), slice(len(output), len(output) + 1), ""))
        output.append(end_id)
    try:
        prompt = teacher.render_ids(said.messages, said.tools)
    except MalformedRequest:
        return None
    task = TeachingTask(turn.index, as_ids([*prompt, *output]), len(prompt), turn.output_ids, chunks)
    return task if chunks and prompt else None


def _begins_alike(turn: Turn, chat: ChatTokenizer, teacher: ChatTokenizer) -> bool:
    """Return True if neither prompt begins the answer, with a required call or with reasoning."""
    plain = chat.render_ids(_PLAIN, ())
    opened = [each.tokenizer.decode(each.render_ids(_PLAIN, ())[-_HEADER:]) for each in (chat, teacher)]
    is_forced = turn.context_ids[-2:].tolist() != plain[-2:]
    return not is_forced and len({_OPENS_REASONING.search(text) is None for text in opened}) == 1


def count_untaught(session: Session, name: str) -> int:
    turns = {turn.index: turn for branch in scored_branches(session) for turn in untaught(session, branch, name)}
    return sum(int(turn.output_ids.size) for turn in turns.values())


def count_top_bytes(session: Session) -> int:
    """Count the bytes of all teachers' most likely tokens."""
    tops = [scores.top for turn in session.turns for scores in turn.teachers.values()]
    return sum(top.ids.nbytes + top.logprobs.nbytes for top in tops if top is not None)


def teach(session: Session, name: str, task: TeachingTask, scoring: PromptLogprobs, top_k: int = 0) -> list[Turn]:
    """Apply the answer to `task`; return changed turns. Raise `EngineReplyInvalid` before any change."""
    _check(name, task, scoring, top_k)
    logprobs, top, changed = as_logprobs(np.minimum(scoring.logprobs, 0.0)), scoring.top, []
    for turn in untaught(session, session.branch(task.leaf), name):
        start, end = turn.prompt_length - task.start, _end(turn) - task.start
        said = task.input_ids[turn.prompt_length : _end(turn)] if task.output_ids is None else task.output_ids
        is_its = start >= 0 if task.output_ids is None else turn.index == task.leaf
        if is_its and np.array_equal(said, turn.output_ids):
            if task.output_ids is None:
                scores = logprobs[start:end], None if top is None else top.part(start, end)
            else:
                scores = share(task.chunks, logprobs, turn.logprobs), None
            taught = {**turn.teachers, name: TeacherScores(scoring.version, *scores)}
            changed.append(structs.replace(turn, teachers=taught))
    session.replace_turns(changed)
    return changed


def share(chunks: Sequence[Chunk], theirs: Logprobs, behavior: Logprobs) -> Logprobs:
    """Return a logprob per own token, NaN outside `chunks`; each chunk sums to the teacher's."""
    column = np.full(behavior.size, np.nan)
    for own, other, _ in chunks:
        total, weights = theirs[other].sum(dtype=np.float64), behavior[own].astype(np.float64)
        column[own] = total * (weights / weights.sum() if weights.sum() else 1 / weights.size)
    return as_logprobs(column)


def _check(name: str, task: TeachingTask, scoring: PromptLogprobs, top_k: int) -> None:
    start, expected, top = task.start, int(task.input_ids.size) - task.start, scoring.top
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
    if top_k and (
        top is None
        or not top.ids.shape == top.logprobs.shape == (expected, top_k)
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

"""Scores of a turn's text by a teacher with another tokenizer, which reads the conversation in its own template.

A chunk's sampled tokens share its logprob in proportion to their behavior logprobs, so that a token of which the policy
was certain gets no blame.
"""

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import structs

from harness.errors import MalformedRequest
from harness.sessions.session import Session
from harness.sessions.teaching import check_scores, untaught
from harness.sessions.weights.scoring import scored_branches
from harness.tokens.alignment import REPLACEMENT, Chunk, Spelled, align
from harness.tokens.chat_tokenizer import ChatTokenizer
from harness.types import Json, Logprobs, Message, PromptLogprobs, TeacherScores, TokenIds, Turn, as_ids, as_logprobs

_PLAIN: Sequence[Message] = ({"role": "user", "content": "Hello."},)
_HEADER = 8  # ids that hold the beginning of an answer
_OPENS_REASONING = re.compile(r"<(think|thinking|thought|reasoning)>\s*$")


class ReadTurn(NamedTuple):
    turn: Turn
    messages: Sequence[Message]
    tools: Sequence[Json]


class AlignedTask(NamedTuple):
    """Engine request to score `input_ids[start:]`, a turn's text in the teacher's ids."""

    leaf: int
    input_ids: TokenIds
    start: int
    output_ids: TokenIds
    chunks: Sequence[Chunk]
    """Pieces with a counterpart; `other` counts from `start`."""


def next_said(session: Session, name: str, given_up: Collection[int]) -> ReadTurn | None:
    """Return the next turn for teacher `name`; skip those in `given_up`."""
    if name not in (session.config.teachers or ()):
        return None
    for branch in scored_branches(session):
        for turn in untaught(session, branch, name):
            if turn.index not in given_up:
                before = branch[: [each.index for each in branch].index(turn.index)]
                earlier = [message for each in before for message in (*each.messages_delta, each.reply)]
                return ReadTurn(turn, [*earlier, *turn.messages_delta], _tools(session, branch[0]))
    return None


def read_aligned(said: ReadTurn, chat: ChatTokenizer, teacher: ChatTokenizer) -> AlignedTask | None:
    """Write a turn in the teacher's ids, slowly; None if its template or tokenizer cannot."""
    turn, own, other = said.turn, chat.tokenizer, teacher.tokenizer
    if not _begins_alike(turn, chat, teacher):
        return None
    ids = turn.output_ids.tolist()
    end_id = teacher.end_of_turn_id if ids[-1] in own.eos_ids else None
    spelled = Spelled.of(own, ids[:-1] if ids[-1] in own.eos_ids else ids)
    theirs = Spelled.of(other, other.encode(spelled.text))
    markers = [marker for marker in own.markers if marker not in other.added_tokens]
    chunks = [
        chunk
        for chunk in align(spelled, theirs)
        if REPLACEMENT not in chunk.text and not any(marker in chunk.text for marker in markers)
    ]
    output = [*theirs.ids]
    if end_id is not None:
        chunks.append(Chunk(slice(len(ids) - 1, len(ids)), slice(len(output), len(output) + 1), ""))
        output.append(end_id)
    try:
        prompt = teacher.render_ids(said.messages, said.tools)
    except MalformedRequest:
        return None
    if not chunks or not prompt:
        return None
    return AlignedTask(turn.index, as_ids([*prompt, *output]), len(prompt), turn.output_ids, chunks)


def _begins_alike(turn: Turn, chat: ChatTokenizer, teacher: ChatTokenizer) -> bool:
    """Return True if neither prompt begins the answer, with a required call or with reasoning."""
    plain = chat.render_ids(_PLAIN, ())
    opened = [each.tokenizer.decode(each.render_ids(_PLAIN, ())[-_HEADER:]) for each in (chat, teacher)]
    is_forced = turn.context_ids[-2:].tolist() != plain[-2:]
    return not is_forced and len({_OPENS_REASONING.search(text) is None for text in opened}) == 1


def teach_aligned(session: Session, name: str, task: AlignedTask, scoring: PromptLogprobs) -> list[Turn]:
    """Apply the answer to `task`; return changed turns. Raise `EngineReplyInvalid` before any change."""
    check_scores(name, task.input_ids, task.start, scoring)
    turn = session.turn(task.leaf)
    if name in turn.teachers or not np.array_equal(turn.output_ids, task.output_ids):
        return []
    scores = TeacherScores(scoring.version, share(task.chunks, np.minimum(scoring.logprobs, 0.0), turn.logprobs))
    changed = [structs.replace(turn, teachers={**turn.teachers, name: scores})]
    session.replace_turns(changed)
    return changed


def share(chunks: Sequence[Chunk], theirs: Logprobs, behavior: Logprobs) -> Logprobs:
    """Return a logprob per own token, NaN outside `chunks`; each chunk sums to the teacher's."""
    column = np.full(behavior.size, np.nan)
    for own, other, _ in chunks:
        total, weights = theirs[other].sum(dtype=np.float64), behavior[own].astype(np.float64)
        column[own] = total * (weights / weights.sum() if weights.sum() else 1 / weights.size)
    return as_logprobs(column)


def _tools(session: Session, root: Turn) -> Sequence[Json]:
    alike = (turn.notes.tool_definitions for turn in session.turns if turn.notes.toolset == root.notes.toolset)
    return next(filter(None, alike), ())

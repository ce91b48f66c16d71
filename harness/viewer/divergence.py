"""Where two sessions part: the first token, of a prompt or of an output, that one has and the other has not.

Turns are compared in order of admission. What engines say of a token (logprob, version) is no difference; where a turn
goes on from, is one.
"""

from dataclasses import dataclass
from enum import StrEnum

from harness.errors import RunError
from harness.tokens.tokenizer import Tokenizer
from harness.viewer.session_view import SessionView, TurnView

_BEFORE, _BEHIND = 8, 24
"""Tokens of a text around the first one that differs."""


class Part(StrEnum):
    """The part of a turn in which two sessions differ."""

    PARENT = "parent"
    """They go on from different turns."""
    PROMPT = "prompt"
    """Different ids were added to the conversation."""
    OUTPUT = "output"
    """Different ids were sampled."""
    TURNS = "turns"
    """One session has no such turn."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference of two sessions; pairs are the first session's and the second's."""

    turn: int
    part: Part
    position: int | None = None
    """In the ids that the turn adds to its prompt, or in its output; None where it is no token."""
    token_ids: tuple[int | None, int | None] = (None, None)
    """None for the one that ends there."""
    texts: tuple[str | None, str | None] = (None, None)
    """From a few tokens before to some behind; None without a tokenizer."""


def find_divergence(
    first: SessionView, second: SessionView, tokenizers: tuple[Tokenizer | None, Tokenizer | None]
) -> Divergence | None:
    """Where the sessions part; None when they have the same tokens in the same turns.

    Raises `RunError` where the tokens of a turn are not in its record.
    """
    for one, other in zip(first.turns, second.turns, strict=False):
        if one.parent != other.parent:
            return Divergence(one.index, Part.PARENT)
        for part in (Part.PROMPT, Part.OUTPUT):
            ids = _ids(one, part), _ids(other, part)
            if ids[0] != ids[1]:
                return _token(one.index, part, ids, tokenizers)
    if len(first.turns) != len(second.turns):
        return Divergence(min(len(first.turns), len(second.turns)), Part.TURNS)
    return None


def _ids(turn: TurnView, part: Part) -> list[int]:
    if len(turn.output_ids) != turn.output_length or (
        turn.prompt_length and turn.parent is None and not turn.context_ids
    ):
        raise RunError(f"the tokens of turn {turn.index} are not here, only their number")
    return list(turn.context_ids if part is Part.PROMPT else turn.output_ids)


def _token(
    turn: int, part: Part, ids: tuple[list[int], list[int]], tokenizers: tuple[Tokenizer | None, Tokenizer | None]
) -> Divergence:
    shorter = min(map(len, ids))
    at = next((place for place, pair in enumerate(zip(*ids, strict=False)) if pair[0] != pair[1]), shorter)
    one, other = (each[at] if at < len(each) else None for each in ids)
    texts = [
        None if tokenizer is None else tokenizer.decode(each[max(0, at - _BEFORE) : at + _BEHIND])
        for each, tokenizer in zip(ids, tokenizers, strict=True)
    ]
    return Divergence(turn, part, at, (one, other), (texts[0], texts[1]))

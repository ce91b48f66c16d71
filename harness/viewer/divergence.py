"""The first difference of two sessions: a token of a prompt or output that only one has.

Turns are compared in order of admission, by tokens and parent; of an heir, without those that its agent did not ask for
again. Engine facts (logprob, version) do not count.
"""

from dataclasses import dataclass
from enum import StrEnum

from harness.errors import RunError
from harness.tokens.tokenizer import Tokenizer
from harness.viewer.session_view import SessionView, TurnView

# Tokens shown around the first different one.
_BEFORE, _BEHIND = 8, 24


class Part(StrEnum):
    """Part of a turn in which two sessions differ."""

    PARENT = "parent"
    PROMPT = "prompt"
    """Different ids were added to the conversation."""
    OUTPUT = "output"
    TURNS = "turns"
    """One session has no such turn."""


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first difference of two sessions. Pairs are (first, second)."""

    turn: int
    part: Part
    position: int | None = None
    """Index in the added prompt ids or in the output; None if no token differs."""
    token_ids: tuple[int | None, int | None] = (None, None)
    """None for the session that ends there."""
    texts: tuple[str | None, str | None] = (None, None)
    """Text around the position; None without a tokenizer."""


def find_divergence(
    first: SessionView, second: SessionView, tokenizers: tuple[Tokenizer | None, Tokenizer | None]
) -> FirstDifference | None:
    """Return the first difference, or None. Raises `RunError` if the record lacks the tokens of a turn."""
    ours, theirs = ([turn for turn in each.turns if turn.asked_again or not turn.inherited] for each in (first, second))
    places: list[dict[int | None, int]] = [
        {turn.index: place for place, turn in enumerate(turns)} for turns in (ours, theirs)
    ]
    for one, other in zip(ours, theirs, strict=False):
        if places[0].get(one.parent) != places[1].get(other.parent):
            return FirstDifference(one.index, Part.PARENT)
        for part in (Part.PROMPT, Part.OUTPUT):
            ids = _ids(one, part), _ids(other, part)
            if ids[0] != ids[1]:
                return _token(one.index, part, ids, tokenizers)
    if len(ours) != len(theirs):
        return FirstDifference(max(ours, theirs, key=len)[min(len(ours), len(theirs))].index, Part.TURNS)
    return None


def _ids(turn: TurnView, part: Part) -> list[int]:
    if len(turn.output_ids) != turn.output_length or (
        turn.prompt_length and turn.parent is None and not turn.context_ids
    ):
        raise RunError(f"the tokens of turn {turn.index} are not here, only their number")
    return list(turn.context_ids if part is Part.PROMPT else turn.output_ids)


def _token(
    turn: int, part: Part, ids: tuple[list[int], list[int]], tokenizers: tuple[Tokenizer | None, Tokenizer | None]
) -> FirstDifference:
    shorter = min(map(len, ids))
    at = next((place for place, pair in enumerate(zip(*ids, strict=False)) if pair[0] != pair[1]), shorter)
    one, other = (each[at] if at < len(each) else None for each in ids)
    texts = [
        None if tokenizer is None else tokenizer.decode(each[max(0, at - _BEFORE) : at + _BEHIND])
        for each, tokenizer in zip(ids, tokenizers, strict=True)
    ]
    return FirstDifference(turn, part, at, (one, other), (texts[0], texts[1]))

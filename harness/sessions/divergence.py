"""Why a request started a branch: the first message that is not what was recorded; and what else was not, in one that
goes on.

Said in the record of the turn, so that whoever looks at a session sees what its client rewrote. Explains only; whether
two messages are the same is `tokens.matching`'s decision.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest

import msgspec

from harness.tokens.matching import STRICT, NormalForm
from harness.types import Json, Message, Turn

_SHOWN = 80  # characters of a value
_MOST_OVERLOOKED = 16


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference between a recorded conversation and the one a client sent."""

    message: int
    """Index in the request's messages; 0 for the tools, which stand before all of them."""
    field: str
    """Name of the message's field; `message` when one side ends here; `tools` for the first tool that differs."""
    recorded: str
    """The recorded value, shortened around the difference; empty when there is none."""
    sent: str

    def to_json(self) -> Json:
        """The form in a turn's notes."""
        return {"message": self.message, "field": self.field, "recorded": self.recorded, "sent": self.sent}


def find_divergence(
    recorded: Sequence[Message], sent: Sequence[Message], first: int, form: NormalForm
) -> Divergence | None:
    """Where `sent` leaves `recorded`; `first` is the index of their first message in the request.

    None when they are the same as far as both go and `sent` is the longer one, or as long.
    """
    for index, (ours, theirs) in enumerate(zip_longest(recorded, sent), start=first):
        if ours is None:
            return None
        if theirs is None:
            return Divergence(index, "message", _shorten(_text(form(ours)), 0), "")
        left, right = form(ours), form(theirs)
        name = next((name for name in (*left, *right) if left.get(name) != right.get(name)), None)
        if name is not None:
            was, said = _text(left.get(name)), _text(right.get(name))
            same = _common_length(was, said)
            return Divergence(index, name, _shorten(was, same), _shorten(said, same))
    return None


def find_overlooked(branch: Sequence[Turn], sent: Sequence[Message], numbers: range) -> list[Divergence]:
    """Where messages of a request are not what the `branch` recorded that it goes on from; of many the last ones.

    Looks at those of `sent` with these `numbers`, up to the last one that the branch has, and reads no other.
    """
    recorded = chain.from_iterable((turn.reply, *reversed(turn.messages_delta)) for turn in reversed(branch))
    pairs = zip(reversed(numbers), recorded, strict=False)
    found = (find_divergence([ours], [sent[number]], number, STRICT) for number, ours in pairs)
    return list(islice(filter(None, found), _MOST_OVERLOOKED))[::-1]


def find_other_tools(recorded: Sequence[Json], sent: Sequence[Json]) -> Divergence | None:
    """The first tool that two requests do not offer alike; None when they are the same."""
    for ours, theirs in zip_longest(recorded, sent):
        if ours != theirs:
            was, said = _text(ours), _text(theirs)
            same = _common_length(was, said)
            return Divergence(0, "tools", _shorten(was, same), _shorten(said, same))
    return None


def _common_length(left: str, right: str) -> int:
    """How many characters two texts begin with in common, by halves: a step per doubling, not per character."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else msgspec.json.encode(value, order="sorted").decode()


def _shorten(text: str, difference: int) -> str:
    """At most `_SHOWN` characters of `text`, those around `difference`."""
    start = max(0, min(difference - _SHOWN // 4, len(text) - _SHOWN))
    shown = text[start : start + _SHOWN]
    return ("…" if start else "") + shown + ("…" if start + _SHOWN < len(text) else "")

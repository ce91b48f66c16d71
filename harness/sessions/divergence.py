"""Why a request started a branch: the first message that is not what was recorded; and what else was not, in one that
goes on. For a session of several roots, what they have in common.

Said in the record of the turn, so that whoever looks at a session sees what its client rewrote. Explains only; whether
two messages are the same is `tokens.matching`'s decision.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

import msgspec

from harness.tokens.matching import EXACT, Matching, NormalForm, normal_form
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
            return _divergence(index, "message", EXACT(ours), None)
        found = form.contradiction(ours, theirs)
        if found is not None:
            return _divergence(index, *found)
    return None


def find_overlooked(ancestry: Iterable[Turn], sent: Sequence[Message], numbers: range) -> list[Divergence]:
    """Return where messages of a request are spelled otherwise than recorded in the branch that it extends.

    The branch comes from its end upward. Looks at those of `sent` with these `numbers`, up to the last one that the
    branch has, and reads no other. Of many differences the last ones are told, of reasoning that was left out the last.
    """
    recorded = chain.from_iterable((turn.reply, *reversed(turn.messages_delta)) for turn in ancestry)
    found: list[Divergence] = []
    lacks_reasoning = False
    for number, ours in zip(reversed(numbers), recorded, strict=False):
        each = find_divergence([ours], [sent[number]], number, EXACT)
        leaves_out = each is not None and each.field == "reasoning_content" and not each.sent
        if each is not None and not (leaves_out and lacks_reasoning):
            found.append(each)
        lacks_reasoning |= leaves_out
        if len(found) == _MOST_OVERLOOKED:
            break
    return found[::-1]


def find_other_tools(recorded: Sequence[Json], sent: Sequence[Json]) -> Divergence | None:
    """The first tool that two requests do not offer alike; None when they are the same."""
    for ours, theirs in zip_longest(recorded, sent):
        if ours != theirs:
            return _divergence(0, "tools", ours, theirs)
    return None


def explain_roots(turns: Sequence[Turn], among: Collection[int] | None = None) -> str:
    """Return in one line why a conversation has several roots, and what to set; empty when it has one.

    Counts usable turns, those `among` alone if it is given. A root without a divergence (a prompt that is asked again)
    is no split.
    """
    splits = [
        (turn, turn.notes["diverged"])
        for turn in turns
        if turn.parent is None
        and turn.is_usable
        and "diverged" in turn.notes
        and (among is None or turn.index in among)
    ]
    if not splits:
        return ""
    [(field, count)] = Counter(diverged["field"] for _, diverged in splits).most_common(1)
    turn, diverged = next(split for split in splits if split[1]["field"] == field)
    number = diverged["message"]
    reason = {
        "tools": f"the tools change between calls, first in turn {turn.index}",
        "message": f"the client leaves out messages[{number}] and what follows",
    }.get(field, f"the client rewrites messages[{number}].{field}")
    often = "" if count == len(splits) else f" ({count} of {len(splits)} times)"
    remedy = "nothing matches that" if field in ("tools", "message") else _remedy(turn, diverged, turns)
    return f"{len(splits) + 1} roots: {reason}{often}; {remedy}"


def _remedy(turn: Turn, diverged: Json, turns: Sequence[Turn]) -> str:
    """What to set so that the message by which `turn` diverged is recognized."""
    values = diverged["recorded"], diverged["sent"]
    if diverged["field"] in ("content", "reasoning_content") and _are_alike(*map(str.strip, values)):
        return f'set matching = ["{Matching.TRIMMED}"]'
    form, sent = normal_form((Matching.CALL_IDS,)), turn.messages_delta[diverged["message"] :][:1]
    ids = [form(message).get("call_ids") for message in sent]
    if any(ids) and any(form(each.reply).get("call_ids") in ids for each in turns):
        return f'set matching = ["{Matching.CALL_IDS}"]'
    if _are_alike(*("".join(text.split()) for text in values)):
        return 'a "package.module:function" of yours in matching can overlook that'
    return "nothing matches that"


def _are_alike(was: str, said: str) -> bool:
    """Whether two shown values are equal as far as both are shown."""
    short, long = sorted((was.removesuffix("…"), said.removesuffix("…")), key=len)
    are_cut = was.endswith("…") and said.endswith("…")
    return bool(short) and (long == short or (are_cut and long.startswith(short)))


def _divergence(message: int, field: str, recorded: object, sent: object) -> Divergence:
    """Shorten both values to the same place around their first difference."""
    was, said = _text(recorded), _text(sent)
    start = max(0, min(_common_length(was, said) - _SHOWN // 4, max(len(was), len(said)) - _SHOWN))
    return Divergence(message, field, _shorten(was, start), _shorten(said, start))


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


def _shorten(text: str, start: int) -> str:
    shown = text[start : start + _SHOWN]
    return ("…" if start else "") + shown + ("…" if start + _SHOWN < len(text) else "")

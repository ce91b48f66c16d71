"""Explanations of new branches: the first message that differs from the record, by `tokens.matching`."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import NamedTuple

import msgspec

from harness.decoding import convert
from harness.tokens.matching import EXACT, Matching, NormalForm, normal_form
from harness.types import Json, Message, SamplingWishes, Turn

_SHOWN = 80  # characters of a value
_MOST_OVERLOOKED = 16


@dataclass(frozen=True, slots=True)
class Divergence:
    """First difference between a recorded conversation and a request."""

    message: int
    """Index in the request; 0 for tools and sampling."""
    field: str
    """`message` if one side ends here; `tools` or `sampling` if those differ."""
    recorded: str
    """Cut around the difference."""
    sent: str

    def to_json(self) -> Json:
        """Return the form in notes."""
        return {"message": self.message, "field": self.field, "recorded": self.recorded, "sent": self.sent}


class Toolset(NamedTuple):
    tools: Sequence[Json] = ()
    digest: str = ""
    """See `TurnNotes.toolset`."""


def find_divergence(
    recorded: Sequence[Message], sent: Sequence[Message], first: int, form: NormalForm
) -> Divergence | None:
    """Return where `sent` leaves `recorded`; `first` is their index in the request."""
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
    """Return messages (`numbers`) spelled differently in the branch that they extend. `ancestry`: leaf to root."""
    recorded = chain.from_iterable((turn.reply, *reversed(turn.messages_delta)) for turn in ancestry)
    found: list[Divergence] = []
    lacks_reasoning = False
    for number, ours in zip(reversed(numbers), recorded, strict=False):
        each = find_divergence([ours], [sent[number]], number, EXACT)
        # Of omitted reasoning, only the last omission is kept.
        leaves_out = each is not None and each.field == "reasoning_content" and not each.sent
        if each is not None and not (leaves_out and lacks_reasoning):
            found.append(each)
        lacks_reasoning |= leaves_out
        if len(found) == _MOST_OVERLOOKED:
            break
    return found[::-1]


def find_other_tools(recorded: Sequence[Json], sent: Sequence[Json]) -> Divergence | None:
    """Return the first tool that differs."""
    for ours, theirs in zip_longest(recorded, sent):
        if ours != theirs:
            return _divergence(0, "tools", ours, theirs)
    return None


def find_other_toolset(roots: Sequence[Turn], sent: Toolset) -> Divergence | None:
    """Return the difference to the newest of `roots`, whose tools only a digest tells; None if a root has these."""
    known = [(root.notes.tools or 0, root.notes.toolset) for root in roots if root.notes.toolset]
    if not known or any(digest == sent.digest for _, digest in known):
        return None
    told = (f"{count} tools, digest {digest[:16]}" for count, digest in (known[0], (len(sent.tools), sent.digest)))
    return Divergence(0, "tools", *told)


def find_other_sampling(recorded: Json, sent: SamplingWishes) -> Divergence | None:
    """Return the first sampling parameter that the client set otherwise."""
    ours, theirs = convert(recorded, SamplingWishes).to_dict(), sent.to_dict()
    for name in sorted(ours | theirs):
        if (was := ours.get(name)) != (said := theirs.get(name)):
            return _divergence(0, "sampling", *(None if v is None else {name: v} for v in (was, said)))
    return None


def explain_roots(turns: Sequence[Turn], among: Collection[int] | None = None) -> str:
    """Explain why a conversation has several roots, and what to set; empty if it has one."""
    # Usable turns only, those `among` if given. A root without a divergence, such as a repeated prompt, is no split.
    splits = [
        (turn, turn.notes.diverged)
        for turn in turns
        if turn.parent is None and turn.is_usable and (among is None or turn.index in among)
        if turn.notes.diverged.get("field") not in (None, "sampling")  # another answer to the same prompt is no split
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
    # Equal as far as both are shown.
    short, long = sorted((was.removesuffix("…"), said.removesuffix("…")), key=len)
    are_cut = was.endswith("…") and said.endswith("…")
    return bool(short) and (long == short or (are_cut and long.startswith(short)))


def _divergence(message: int, field: str, recorded: object, sent: object) -> Divergence:
    # Both values are cut at the same place, around their first difference.
    was, said = _text(recorded), _text(sent)
    start = max(0, min(_common_length(was, said) - _SHOWN // 4, max(len(was), len(said)) - _SHOWN))
    return Divergence(message, field, _shorten(was, start), _shorten(said, start))


def _common_length(left: str, right: str) -> int:
    # Bisection: a step per doubling, not per character.
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

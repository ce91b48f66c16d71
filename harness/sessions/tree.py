"""The tree of turns of one session.

A turn hangs below the turn whose conversation it continues. Nothing is ever removed or rewritten: a client that
changes its history gets another branch (I1). The place of a request is found by looking up the digests of its
prefixes, deepest first.

A digest leaves out what clients leave out, so the turns found are compared with the request, from their end upward.
A turn is compared with an exact prefix once: a request costs what is new in it (I11).
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Self

from harness.sessions.token_log import TokenPath
from harness.tokens.history import Prefix
from harness.tokens.matching import EXACT, ChainKey, NormalForm, next_key
from harness.types import Message, Turn

_MOST_COMPARISONS = 4_096  # remembered beside two for each turn
_MOST_CHILDREN = 4  # remembered of each turn


@dataclass(frozen=True, slots=True)
class AttachPoint:
    """Where a request joins the tree."""

    parent: int | None
    """Index of the turn it extends; None starts a new root."""
    matched: int
    """How many messages of the request the tree knows already."""
    key: ChainKey
    """Digest of the request's whole conversation."""
    others: tuple[int, ...] = ()
    """Turns that it could extend as well."""


class TurnTree:
    """Turns of a session by index, with their paths."""

    def __init__(self, form: NormalForm = EXACT) -> None:
        self._form = form
        self._turns: dict[int, Turn] = {}
        self._paths: dict[int, TokenPath] = {}
        self._by_key: dict[ChainKey, tuple[int, ...]] = {}
        self._latest_children: dict[int | None, tuple[int, ...]] = {}
        self._deliveries: dict[int, int] = {}  # their order; a restart forgets it
        self._handed_over = 0
        self._differences: dict[tuple[ChainKey, int], int | None] = {}
        self._by_response: dict[str, int] = {}
        self._by_call: dict[str, int] = {}

    @property
    def turns(self) -> list[Turn]:
        """All turns, in order of admission."""
        return [self._turns[index] for index in sorted(self._turns)]

    def turn(self, index: int) -> Turn:
        """The turn with that index."""
        return self._turns[index]

    def path(self, index: int | None) -> TokenPath:
        """Prompt and output ids up to the end of a turn; the empty path for None."""
        return TokenPath.empty() if index is None else self._paths[index]

    def ancestry(self, index: int | None) -> Iterator[Turn]:
        """Yield the turn with that index and those it extends, up to the root."""
        while index is not None:
            yield self._turns[index]
            index = self._turns[index].parent

    def attach(self, prefixes: Sequence[Prefix], messages: Sequence[Message]) -> AttachPoint:
        """Return the deepest turn whose conversation a request with these `prefixes` and `messages` continues.

        Several turns that fit (re-samples that came out equal, or differ in what the client left out) count as the one
        that is spelled most like the request, then the one that was delivered last, then the one admitted last.
        """
        for matched in range(len(prefixes) - 1, -1, -1):
            candidates = self._by_key.get(prefixes[matched].key, ())
            if not candidates:
                continue
            if self._form.is_exact:
                return AttachPoint(max(candidates), matched, prefixes[-1].key)
            found = {index: self._compare(index, matched, prefixes, messages) for index in candidates}
            ranks = [
                (-count, self._deliveries.get(index, 0), self._turns[index].delivered, index)
                for index, count in found.items()
                if count is not None
            ]
            if ranks:
                parent, *others = (rank[-1] for rank in sorted(ranks, reverse=True))
                return AttachPoint(parent, matched, prefixes[-1].key, tuple(others))
        return AttachPoint(None, 0, prefixes[-1].key)

    def add(self, turn: Turn, path: TokenPath) -> None:
        """Take in a turn, or another outcome of one that broke off; it becomes an attach point when it is usable."""
        self._turns[turn.index] = turn
        self._paths[turn.index] = path
        if turn.is_usable:
            key = next_key(turn.key, turn.reply, self._form)
            self._by_key[key] = (*(index for index in self._by_key.get(key, ()) if index != turn.index), turn.index)
            children = {turn.index, *self._latest_children.get(turn.parent, ())}
            self._latest_children[turn.parent] = tuple(sorted(children)[-_MOST_CHILDREN:])
            if "response_id" in turn.notes:
                self._by_response[turn.notes["response_id"]] = turn.index
            self._by_call.update((call["id"], turn.index) for call in turn.reply.get("tool_calls") or ())

    def answered_as(self, response_id: str) -> Turn | None:
        """The usable turn that was answered under that id; None when there is none."""
        index = self._by_response.get(response_id)
        return None if index is None else self._turns[index]

    def caller(self, call_id: str) -> Turn | None:
        """The usable turn that made the tool call with that id; None when there is none."""
        index = self._by_call.get(call_id)
        return None if index is None else self._turns[index]

    def latest_children(self, index: int | None) -> list[Turn]:
        """The turns admitted last of those that extend `index` (None: of the roots) and are usable, the last first."""
        return [self._turns[child] for child in reversed(self._latest_children.get(index, ()))]

    def snapshot(self) -> Self:
        """A tree of its own with the turns of now."""
        frozen = copy(self)
        frozen._turns, frozen._paths = dict(self._turns), dict(self._paths)  # noqa: SLF001  # the copy is of this class
        frozen._by_key, frozen._latest_children = dict(self._by_key), dict(self._latest_children)  # noqa: SLF001
        return frozen

    def replace(self, turn: Turn) -> None:
        """Put `turn` in the place of the one with its index; ids, parent and reply must be the same."""
        self._turns[turn.index] = turn

    def mark_delivered(self, index: int, *, delivered: bool) -> Turn:
        """Note that the answer of a turn has been handed over, after all those before, or that it has not."""
        self.replace(turn := replace(self._turns[index], delivered=delivered))
        self._handed_over += delivered
        self._deliveries[index] = self._handed_over if delivered else 0
        return turn

    def _compare(self, index: int, matched: int, prefixes: Sequence[Prefix], messages: Sequence[Message]) -> int | None:
        """Return how many of the first `matched` messages are spelled otherwise than recorded up to the turn `index`.

        None when one of them says something else.
        """
        walked: list[tuple[tuple[ChainKey, int], int | None]] = []
        count: int | None = 0
        for turn in self.ancestry(index):
            place = prefixes[matched].exact, turn.index
            if place in self._differences:
                count = self._differences[place]
                break
            recorded = (turn.reply, *reversed(turn.messages_delta))
            own = self._count_differences(recorded, messages, matched - 1)
            walked.append((place, own))
            matched -= len(recorded)
            if own is None:
                break
        if len(self._differences) > _MOST_COMPARISONS + 2 * len(self._turns):
            self._differences.clear()
        for place, own in reversed(walked):
            count = None if count is None or own is None else count + own
            self._differences[place] = count
        return count

    def _count_differences(self, recorded: Sequence[Message], messages: Sequence[Message], last: int) -> int | None:
        """The same for the messages up to number `last`, which are `recorded`, the last one first."""
        count = 0
        for number, ours in zip(range(last, -1, -1), recorded, strict=False):
            if ours["role"] != "assistant":  # its digest covers all of it
                continue
            theirs = messages[number]
            if EXACT(ours) != EXACT(theirs):
                if self._form.contradiction(ours, theirs) is not None:
                    return None
                count += 1
        return count

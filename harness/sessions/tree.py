"""Tree of a session's turns.

A turn is a child of the turn that it continues. Turns are never removed or rewritten: a client that changes its history
gets another branch (I1). Digests of a request's prefixes find its place, deepest first.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Self

import msgspec
from msgspec import structs

from harness.sessions.token_log import TokenPath
from harness.tokens.history import Prefix
from harness.tokens.matching import EXACT, ChainKey, NormalForm, next_key
from harness.types import Message, Turn

_MOST_COMPARISONS = 4_096  # kept in addition to two per turn
_MOST_CHILDREN = 4  # kept per turn


class AttachPoint(msgspec.Struct, frozen=True):
    parent: int | None
    """None starts a new root."""
    matched: int
    """Request messages in the tree."""
    key: ChainKey
    others: tuple[int, ...] = ()
    """Other turns that fit."""
    is_literal: bool = False
    """The matched messages are spelled as recorded."""


class TurnTree:
    """Turns by index."""

    def __init__(self, form: NormalForm = EXACT) -> None:
        self._form = form
        self._turns: dict[int, Turn] = {}
        self._paths: dict[int, TokenPath] = {}
        self._by_key: dict[ChainKey, tuple[int, ...]] = {}
        self._latest_children: dict[int | None, tuple[int, ...]] = {}
        self._deliveries: dict[int, int] = {}  # in order; lost in a restart
        self._handed_over = 0
        self._differences: dict[tuple[ChainKey, int], int | None] = {}
        self._by_response: dict[str, int] = {}
        self._by_call: dict[str, int] = {}

    @property
    def turns(self) -> list[Turn]:
        """In order of admission."""
        return [self._turns[index] for index in sorted(self._turns)]

    def turn(self, index: int) -> Turn:
        return self._turns[index]

    def path(self, index: int | None) -> TokenPath:
        """Return prompt and output ids of a turn."""
        return TokenPath.empty() if index is None else self._paths[index]

    def ancestry(self, index: int | None) -> Iterator[Turn]:
        """Yield the turn and its ancestors, up to the root."""
        while index is not None:
            yield self._turns[index]
            index = self._turns[index].parent

    def attach(self, prefixes: Sequence[Prefix], messages: Sequence[Message]) -> AttachPoint:
        """Return the deepest turn that a request continues.

        If several fit: the one spelled most like it, then the one delivered last, then the one admitted last.
        """
        for matched in range(len(prefixes) - 1, -1, -1):
            candidates = self._by_key.get(prefixes[matched].key, ())
            if not candidates:
                continue
            is_literal = not self._form.has_steps
            if self._form.is_exact:
                return AttachPoint(max(candidates), matched, prefixes[-1].key, is_literal=is_literal)
            # A digest omits what clients omit, so the messages themselves are compared.
            found = {index: self._compare(index, matched, prefixes, messages) for index in candidates}
            ranks = [
                (-count, self._deliveries.get(index, 0), self._turns[index].delivered, index)
                for index, count in found.items()
                if count is not None
            ]
            if ranks:
                ranks.sort(reverse=True)
                parent, *others = (rank[-1] for rank in ranks)
                is_literal &= not ranks[0][0]
                return AttachPoint(parent, matched, prefixes[-1].key, tuple(others), is_literal)
        return AttachPoint(None, 0, prefixes[-1].key)

    def add(self, turn: Turn, path: TokenPath) -> None:
        """Add a turn or its next outcome."""
        self._turns[turn.index] = turn
        self._paths[turn.index] = path
        if turn.is_usable:
            key = next_key(turn.key, turn.reply, self._form)
            self._by_key[key] = (*(index for index in self._by_key.get(key, ()) if index != turn.index), turn.index)
            children = {turn.index, *self._latest_children.get(turn.parent, ())}
            self._latest_children[turn.parent] = tuple(sorted(children)[-_MOST_CHILDREN:])
            if turn.notes.response_id:
                self._by_response[turn.notes.response_id] = turn.index
            self._by_call.update((call["id"], turn.index) for call in turn.reply.get("tool_calls") or ())

    def answered_as(self, response_id: str) -> Turn | None:
        """Return the usable turn with that response id."""
        index = self._by_response.get(response_id)
        return None if index is None else self._turns[index]

    def caller(self, call_id: str) -> Turn | None:
        """Return the usable turn that made the tool call."""
        index = self._by_call.get(call_id)
        return None if index is None else self._turns[index]

    def latest_children(self, index: int | None) -> list[Turn]:
        """Return the latest usable children (roots for None), newest first."""
        return [self._turns[child] for child in reversed(self._latest_children.get(index, ()))]

    def snapshot(self) -> Self:
        """Return an independent tree."""
        frozen = copy(self)
        frozen._turns, frozen._paths = dict(self._turns), dict(self._paths)  # noqa: SLF001  # the copy is of this class
        frozen._by_key, frozen._latest_children = dict(self._by_key), dict(self._latest_children)  # noqa: SLF001
        return frozen

    def replace(self, turn: Turn) -> None:
        """Replace a turn; ids, parent and reply must be equal."""
        self._turns[turn.index] = turn

    def mark_delivered(self, index: int, *, delivered: bool) -> Turn:
        self.replace(turn := structs.replace(self._turns[index], delivered=delivered))
        self._handed_over += delivered
        self._deliveries[index] = self._handed_over if delivered else 0
        return turn

    def _compare(self, index: int, matched: int, prefixes: Sequence[Prefix], messages: Sequence[Message]) -> int | None:
        # From the leaf upward, and once per exact prefix: a request costs only what is new in it (I11).
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
        count = 0
        # `recorded` is newest first.
        for number, ours in zip(range(last, -1, -1), recorded, strict=False):
            if ours["role"] != "assistant":  # the digest covers all of it
                continue
            theirs = messages[number]
            if ours != theirs and EXACT(ours) != EXACT(theirs):
                if self._form.contradiction(ours, theirs) is not None:
                    return None
                count += 1
        return count

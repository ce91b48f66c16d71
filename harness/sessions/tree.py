"""The tree of turns of one session.

A turn hangs below the turn whose conversation it continues. Nothing is ever removed or rewritten: a client that
changes its history gets another branch (I1). The place of a request is found by looking up the digests of its
prefixes, deepest first.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Self

from harness.sessions.token_log import TokenPath
from harness.tokens.matching import STRICT, ChainKey, NormalForm, next_key
from harness.types import Turn


@dataclass(frozen=True, slots=True)
class AttachPoint:
    """Where a request joins the tree."""

    parent: int | None
    """Index of the turn it extends; None starts a new root."""
    matched: int
    """How many messages of the request the tree knows already."""
    key: ChainKey
    """Digest of the request's whole conversation."""


class TurnTree:
    """Turns of a session by index, with their paths."""

    def __init__(self, form: NormalForm = STRICT) -> None:
        self._form = form
        self._turns: dict[int, Turn] = {}
        self._paths: dict[int, TokenPath] = {}
        self._by_key: dict[ChainKey, int] = {}
        self._latest_children: dict[int | None, int] = {}
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

    def attach(self, keys: Sequence[ChainKey]) -> AttachPoint:
        """The deepest turn whose conversation is a prefix of the request with the prefix digests `keys`.

        Several turns with the same conversation (a re-sample that came out equal) count as the one that was
        admitted last, in whatever order they came to an end.
        """
        for matched in range(len(keys) - 1, -1, -1):
            parent = self._by_key.get(keys[matched])
            if parent is not None:
                return AttachPoint(parent, matched, keys[-1])
        return AttachPoint(None, 0, keys[-1])

    def add(self, turn: Turn, path: TokenPath) -> None:
        """Take in a turn, or another outcome of one that broke off; it becomes an attach point when it is usable."""
        self._turns[turn.index] = turn
        self._paths[turn.index] = path
        if turn.is_usable:
            key = next_key(turn.key, turn.reply, self._form)
            self._by_key[key] = max(turn.index, self._by_key.get(key, -1))
            self._latest_children[turn.parent] = max(turn.index, self._latest_children.get(turn.parent, -1))
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

    def latest_child(self, index: int | None) -> Turn | None:
        """The turn admitted last of those that extend `index` (None: of the roots) and are usable."""
        child = self._latest_children.get(index)
        return None if child is None else self._turns[child]

    def snapshot(self) -> Self:
        """A tree of its own with the turns of now."""
        frozen = copy(self)
        frozen._turns, frozen._paths = dict(self._turns), dict(self._paths)  # noqa: SLF001  # the copy is of this class
        frozen._by_key, frozen._latest_children = dict(self._by_key), dict(self._latest_children)  # noqa: SLF001
        return frozen

    def replace(self, turn: Turn) -> None:
        """Put `turn` in the place of the one with its index; ids, parent and reply must be the same."""
        self._turns[turn.index] = turn

"""A session that somebody looks into, as far as its record has been read; and which of that a browser does not have.

The record is read from the first turn on that may have changed. Of the turns before that one the server says how they
stand, since a later turn can put an earlier one out of every sample. Ids and logprobs are kept as the page reads them,
11 bytes for each token, and as nothing else.
"""

from dataclasses import replace
from itertools import count

from harness.tokens.tokenizer import Tokenizer
from harness.types import Json
from harness.viewer.page.page_data import TokenTable, finite, session_facts, token_columns, turn_data
from harness.viewer.session_view import SessionView, TurnView

_FOR_GOOD = ("parent", "status", "output_length", "seconds")  # of a turn that has not gone on again
_COLUMNS = ("context_ids", "output_ids", "logprobs")


class _SeenTurn:
    """A turn as the page has it."""

    def __init__(self, record: Json, columns: Json, version: int) -> None:
        self.record = record
        """Of the server, without its columns."""
        self.version = version
        self.view = TurnView.of(record)
        self._shown = finite(turn_data(self.view))
        self._columns = columns
        self._columns_version = version

    def changed(self, record: Json, version: int) -> "_SeenTurn":
        """The same turn, which stands otherwise by now; its tokens are those that they were."""
        turn = _SeenTurn(record, self._columns, version)
        turn._columns_version = self._columns_version
        return turn

    def since(self, version: int) -> Json:
        """What the page has of it, with its tokens where a browser of that version does not have them."""
        columns = self._columns if self._columns_version > version else {}
        return {**self._shown, **columns}


class SeenRecord:
    """What has been read of one session."""

    def __init__(self, session_id: str) -> None:
        self._turns: dict[int, _SeenTurn] = {}
        self._shown = _show(SessionView(session_id, "not read yet", [], 0, {}, {}))
        self._missing = ""
        self._version = 0
        self.unread_since = 0
        """The first turn not read yet. Where one before it has gone on, a record from there on does not fit."""

    def take(self, record: Json, since: int, tokenizer: Tokenizer | None, table: TokenTable, version: int) -> bool:
        """Take in the record from the turn `since` on; whether that fits to what was read before.

        If it does not, all of it has to be read. Decodes tokens: as long as the turns from there on. What it raises of
        a record that is damaged leaves everything as it was.
        """
        turns: dict[int, _SeenTurn] = {}
        for each in record["turns"]:
            before = self._turns.get(each["turn"])
            if each["turn"] >= since:
                turns[each["turn"]] = _read_turn(each, before, tokenizer, table, version)
                continue
            if before is None or any(before.record[name] != each[name] for name in _FOR_GOOD):
                return False
            changed = {**before.record, **each}
            turns[each["turn"]] = before if changed == before.record else before.changed(changed, version)
        session = replace(SessionView.of({**record, "turns": []}), turns=[turns[each].view for each in sorted(turns)])
        # One in flight may stand before the last that is recorded.
        unread = (index for index in count() if index not in turns)
        unread_since = next(unread) if session.turns_in_flight else max(turns, default=-1) + 1
        self._shown, self._turns, self.unread_since = _show(session), turns, unread_since
        self._missing, self._version = "", version
        return True

    def miss(self, why: str, version: int) -> None:
        """Its record could not be read, for that reason; what was read before stays."""
        if why != self._missing:
            self._missing, self._version = why, version

    def since(self, version: int) -> Json | None:
        """How it stands, and the turns that have changed since that version; None when nothing has."""
        if version >= self._version:
            return None
        changed = [turn for turn in self._turns.values() if turn.version > version]
        return {
            **self._shown,
            "version": self._version,
            "missing": self._missing,
            "turns": [turn.since(version) for turn in changed],
        }


def _show(session: SessionView) -> Json:
    """What the page has of it besides its turns."""
    order = [(turn.index, depth) for turn, depth in session.walk()]
    return {**finite(session_facts(session)), "order": order}


def _read_turn(
    record: Json, before: _SeenTurn | None, tokenizer: Tokenizer | None, table: TokenTable, version: int
) -> _SeenTurn:
    """A turn that came whole; the one of before where it is the same."""
    rest = {name: value for name, value in record.items() if name not in _COLUMNS}
    if before is not None and before.record == rest:
        return before
    return _SeenTurn(rest, token_columns(TurnView.of(record), tokenizer, table), version)

"""An open session's record as read so far, and the parts that a browser lacks.

The record is read from the first turn that may have changed. For earlier turns the server sends their state, since a
later turn can remove an earlier one from every sample. Ids and logprobs are kept in the page's form only.
"""

from dataclasses import replace
from itertools import count

from harness.tokens.tokenizer import Tokenizer
from harness.types import Json
from harness.viewer.page.page_data import TokenTable, finite, session_facts, token_columns, turn_data
from harness.viewer.session_view import SessionView, TurnView

# Constant for a turn that has not continued.
_FOR_GOOD = ("parent", "status", "output_length", "seconds")
_COLUMNS = ("context_ids", "output_ids", "logprobs")


class _SeenTurn:
    def __init__(self, record: Json, columns: Json, version: int) -> None:
        self.record = record
        self.version = version
        self.view = TurnView.of(record)
        self._shown = finite(turn_data(self.view))
        self._columns = columns
        self._columns_version = version

    def changed(self, record: Json, version: int) -> "_SeenTurn":
        """Return this turn with a changed state and the same tokens."""
        turn = _SeenTurn(record, self._columns, version)
        turn._columns_version = self._columns_version
        return turn

    def since(self, version: int) -> Json:
        """Return the page's data, with tokens if a browser of `version` lacks them."""
        columns = self._columns if self._columns_version > version else {}
        return {**self._shown, **columns}


class SeenRecord:
    """The part of one session that was read."""

    def __init__(self, session_id: str) -> None:
        self._turns: dict[int, _SeenTurn] = {}
        self._shown = _show(SessionView(session_id, "not read yet", [], 0, {}, {}))
        self._missing = ""
        self._version = 0
        self.unread_since = 0
        """First turn not read yet. A record from here on does not fit if an earlier turn continued."""

    def take(self, record: Json, since: int, tokenizer: Tokenizer | None, table: TokenTable, version: int) -> bool:
        """Take in the record from turn `since` on. Return whether it fits the earlier turns; if not, read all of it.

        Decodes tokens, so it takes time. Raises for a damaged record, and changes nothing then.
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
        # A turn in flight may precede the last recorded one.
        unread = (index for index in count() if index not in turns)
        unread_since = next(unread) if session.turns_in_flight else max(turns, default=-1) + 1
        self._shown, self._turns, self.unread_since = _show(session), turns, unread_since
        self._missing, self._version = "", version
        return True

    def miss(self, why: str, version: int) -> None:
        """Note why the record could not be read. Earlier data stays."""
        if why != self._missing:
            self._missing, self._version = why, version

    def since(self, version: int) -> Json | None:
        """Return the state and the turns changed since `version`, or None."""
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
    order = [(turn.index, depth) for turn, depth in session.walk()]
    return {**finite(session_facts(session)), "order": order}


def _read_turn(
    record: Json, before: _SeenTurn | None, tokenizer: Tokenizer | None, table: TokenTable, version: int
) -> _SeenTurn:
    rest = {name: value for name, value in record.items() if name not in _COLUMNS}
    if before is not None and before.record == rest:
        return before
    return _SeenTurn(rest, token_columns(TurnView.of(record), tokenizer, table), version)

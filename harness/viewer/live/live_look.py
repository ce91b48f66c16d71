"""Looks at a server for all browsers: at most once a second, and never without a request.

A look reads the list of sessions, new hold times, and the turn times of changed sessions. Only sessions open in a
browser have their record read, from the first turn that may have changed. So the cost depends on the number of sessions
and their changes, not on the length of conversations. An unreachable server is reported and asked again.

For earlier turns of a record the server sends their state, since a later turn can remove an earlier one from every
sample. Ids and logprobs are kept in the page's form only.
"""

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import NamedTuple

from harness.errors import HarnessError
from harness.machine.clock import Clock
from harness.rollouts.client.session_server import SessionServerClient
from harness.sessions.record import MOST_ASKED_IDS
from harness.tokens.tokenizer import Tokenizer
from harness.types import Json
from harness.viewer.live.live_reading import LiveSessions, read_server
from harness.viewer.live.seen_server import SeenServer, Standing
from harness.viewer.page.page_data import TokenTable, finite, session_facts, token_columns, turn_data
from harness.viewer.run_view import say_missing
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


_EVERY_S = 1.0
# Seconds of rest per second of a look, so that a server with 100,000 sessions is not kept busy.
_REST = 10.0
_ASK_S = 10.0
_TIMES_A_LOOK = 20
# Sessions whose tokens are kept. Others are read again.
_OPEN = 8


class BrowserState(NamedTuple):
    """A browser's state and request."""

    version: int
    """Version of the server that the browser has; 0 for none."""
    texts: int
    """Rows of the token table that it has."""
    session_id: str
    """Open session; empty for none."""
    record_version: int
    """Version of that session that it has."""


class LiveLook:
    """Source of the live page's data about the server of `client`. `missing` are sentences about the tokenizer."""

    def __init__(
        self,
        client: SessionServerClient,
        tokenizer: Tokenizer | None,
        clock: Clock = time.monotonic,
        missing: Sequence[str] = (),
    ) -> None:
        self._missing = missing
        self._client = client
        self._tokenizer = tokenizer
        self._clock = clock
        self._live = LiveSessions()
        self._seen = SeenServer()
        self._table = TokenTable()
        # By id and creation time, since ids may be reused.
        self._records: OrderedDict[tuple[str, float], tuple[SeenRecord, Standing | None]] = OrderedDict()
        self._record_versions = 0
        # All browsers share one look.
        self._looking = asyncio.Lock()
        # Records are read one at a time, so that browsers never see a half-read one.
        self._reading = asyncio.Lock()
        self._fresh_until = -math.inf
        self._holds_since = 0.0
        self._problem = ""

    async def look(self) -> None:
        """Look at the server now. Raises `SessionServerError`."""
        reading = await read_server(self._client, self._live, self._clock(), deadline_s=_ASK_S)
        self._seen.take_list(reading.listed, self._live.rates)
        problems = [*reading.listed.problems, *await self._look_at_times()]
        said = [f"{name}: {words}" for name, words in reading.facts()]
        self._seen.take_facts({"said": said, "missing": self._missing, "problems": [*dict.fromkeys(problems)]})

    async def _look_at_times(self) -> list[str]:
        """Read new hold and turn times. Return the problems of shards that did not answer."""
        holds = await self._client.hold_times(self._holds_since, deadline_s=_ASK_S)
        self._holds_since = holds.now
        self._seen.take_holds(holds)
        asked, problems = set[str](), list[str]()
        for _ in range(_TIMES_A_LOOK):
            unseen = self._seen.unseen_times(MOST_ASKED_IDS, asked)
            if not unseen:
                break
            standings = {each: seen.standing for each in unseen if (seen := self._seen.session(each))}
            told = await self._client.times(unseen, deadline_s=_ASK_S)
            self._seen.take_times(standings, told)
            asked |= unseen.keys() - {*told.left_off}
            problems += told.problems
        return problems

    async def tell(self, asked: BrowserState) -> Json:
        """Return what the browser lacks, at most a second old; `problem` explains older data."""
        problem = await self._refresh()
        record = None
        if asked.session_id:
            record = await self._read(asked.session_id)
        told = self._seen.since(asked.version)
        return {
            **told,
            "problem": problem,
            "session": record and record.since(asked.record_version),
            "texts": self._table.rows[asked.texts :],
        }

    async def _refresh(self) -> str:
        async with self._looking:
            began = self._clock()
            if began < self._fresh_until:
                return self._problem
            self._problem = ""
            try:
                await self.look()
            except HarnessError as error:
                self._problem = error.message
            ended = self._clock()
            self._fresh_until = ended + max(_EVERY_S, _REST * (ended - began))
            return self._problem

    async def _read(self, session_id: str) -> SeenRecord | None:
        """Return the session, read up to its latest change; None if it was never seen."""
        async with self._reading:
            seen = self._seen.session(session_id)
            if seen is None:
                return None
            key = session_id, seen.summary.created_at
            record, read_at = self._records.pop(key, (SeenRecord(session_id), None))
            self._records[key] = record, read_at
            while len(self._records) > _OPEN:
                self._records.popitem(last=False)
            standing: Standing | None = seen.standing
            if seen.is_gone or self._problem or standing == read_at:
                return record
            missing: list[str] = []
            with say_missing("its turns", missing):
                try:
                    await self._read_on(session_id, record)
                except HarnessError:
                    # Read it again next time. Damaged records, in contrast, stay so until they change.
                    standing = None
                    raise
            self._records[key] = record, standing
            if missing:
                self._record_versions += 1
                record.miss(missing[0], self._record_versions)
            return record

    async def _read_on(self, session_id: str, record: SeenRecord) -> None:
        for since in (record.unread_since, 0):
            told = await self._client.record(session_id, since)
            if told.get("phase") == "unknown":
                return  # the next look reports that it is gone
            self._record_versions += 1
            version = self._record_versions
            # In a thread, because decoding 30,000 tokens takes a second and other browsers wait.
            if await asyncio.to_thread(record.take, told, since, self._tokenizer, self._table, version):
                return

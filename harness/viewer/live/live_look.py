"""Looks at a server for all browsers: at most once a second, and never without a request.

A look reads the list of sessions, new hold times, and the turn times of changed sessions. Only sessions open in a
browser have their record read, from the first turn that may have changed. So the cost depends on the number of sessions
and their changes, not on the length of conversations. An unreachable server is reported and asked again.
"""

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from harness.errors import HarnessError
from harness.machine.clock import Clock
from harness.rollouts.client.session_server import SessionServerClient
from harness.sessions.record import MOST_ASKED_IDS
from harness.tokens.tokenizer import Tokenizer
from harness.types import Json
from harness.viewer.damaged_run import say_missing
from harness.viewer.live.live_reading import LiveSessions, read_server
from harness.viewer.live.seen_record import SeenRecord
from harness.viewer.live.seen_server import SeenServer, Standing
from harness.viewer.page.page_data import TokenTable

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

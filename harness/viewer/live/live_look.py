"""Looks at a server on behalf of browsers: at most once a second for all of them, and not at all while none asks.

A look is the list of sessions, what had held the gate since the last one, and the times of turns of those sessions
whose turns have changed. A record is read of a session that a browser has open, once it has changed, from the first
turn on that may be another one. So a look costs what there are sessions, and what has happened in them; never what has
been said.

A server that does not answer is a sentence, and is asked again.
"""

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from http import HTTPStatus
from typing import NamedTuple

from harness.client.session_server import SessionServerClient
from harness.errors import HarnessError, SessionServerError
from harness.machine.clock import Clock
from harness.sessions.record import MOST_ASKED_IDS
from harness.tokens.tokenizer import Tokenizer
from harness.types import Json
from harness.viewer.damage import say_missing
from harness.viewer.live.seen_record import SeenRecord
from harness.viewer.live.seen_server import SeenServer, Standing, totals_words
from harness.viewer.page.page_data import TokenTable

_EVERY_S = 1.0
_REST = 10.0  # for each second that a look took: a server with a hundred thousand sessions has better things to do
_ASK_S = 10.0
_TIMES_A_LOOK = 20
_TOO_OLD_LOOKS = 30  # before a server is asked again what it did not know; it may have been something else in between
_OPEN = 8  # sessions whose tokens are kept; a browser that has another one open has it read again

_TOO_OLD = "its pauses and the times of its turns: the server is of an earlier version, which does not say them"


class Asked(NamedTuple):
    """What a browser has, and wants to see."""

    version: int
    """Of the server as it was told of it; 0 of one that has nothing."""
    texts: int
    """Rows of the table of tokens that it has."""
    session_id: str
    """That it has open; empty for none."""
    record_version: int
    """Of that session, as it was told of it."""


class LiveLook:
    """What there is to see of the server behind `client`.

    Args:
        client: Of the server; its owner closes it.
        tokenizer: For the texts of tokens.
        clock: Seconds, of which looks are so far apart.
        missing: Sentences about the tokenizer.
    """

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
        self._seen = SeenServer()
        self._table = TokenTable()
        self._records: OrderedDict[tuple[str, float], tuple[SeenRecord, Standing | None]] = OrderedDict()
        """By id and creation: an id may be used again."""
        self._record_versions = 0
        self._looking = asyncio.Lock()  # one look for all who ask
        self._reading = asyncio.Lock()  # one record at a time, and nobody takes half of one
        self._fresh_until = -math.inf
        self._holds_since = 0.0
        self._too_old_for = 0
        """So many looks more."""
        self._problem = ""

    async def look(self) -> None:
        """Look at the server now. Raises `SessionServerError`."""
        gate = await self._client.gate().report(deadline_s=_ASK_S)  # a server that has gone says so at once
        listed = await self._client.list_all(deadline_s=_ASK_S)
        self._seen.take_list(listed)
        problems = [*listed.problems]
        self._too_old_for = max(0, self._too_old_for - 1)
        if not self._too_old_for:
            try:
                problems += await self._look_at_times()
            except SessionServerError as error:
                if error.code != "invalid_answer" and error.status != HTTPStatus.NOT_FOUND:
                    raise
                self._too_old_for = _TOO_OLD_LOOKS
        missing = [*self._missing]
        missing += [_TOO_OLD] if self._too_old_for else []
        waiting = f", {gate.held} requests wait" if gate.held else ""
        said = [totals_words(listed), f"gate: {gate.state}{waiting}"]
        self._seen.take_facts({"said": said, "missing": missing, "problems": [*dict.fromkeys(problems)]})

    async def _look_at_times(self) -> list[str]:
        """See what is new of the gate and of turns; says which shards have not told of theirs."""
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

    async def tell(self, asked: Asked) -> Json:
        """What a browser does not have yet, a second old at most; `problem` says why it is older."""
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
                self._problem, self._too_old_for = error.message, 0
            ended = self._clock()
            self._fresh_until = ended + max(_EVERY_S, _REST * (ended - began))
            return self._problem

    async def _read(self, session_id: str) -> SeenRecord | None:
        """The session, read as far as it has changed; None of one that was never seen."""
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
                except HarnessError:  # it may be there the next time; what is damaged stays so until it changes
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
                return  # the next look says that it is gone
            self._record_versions += 1
            version = self._record_versions
            # Decoding 30,000 tokens takes a second; other browsers are answered meanwhile.
            if await asyncio.to_thread(record.take, told, since, self._tokenizer, self._table, version):
                return

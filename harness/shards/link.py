"""A front's link to one of its shards: where it answers, how it stands, and what it holds.

A shard is told how to stand whenever the gate of the front changes and once a second besides; its answer says what it
holds. It *serves* when it has answered the last telling. One that does not is told again and again, gets no session,
and costs a verb its deadline and a line.

Tellings to a shard come one after the other, and each is made of the gate as it is when its turn has come. So when
`tell` returns, the shard stands as the front did when it was called, or later.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import NamedTuple, TypeVar

import aiohttp
import msgspec
from yarl import URL

from harness.errors import HarnessError, ShardLost, ShardUnavailable
from harness.machine.deadlines import not_in_time, read_end, within
from harness.machine.log import get_logger
from harness.server.gatekeeper import Gatekeeper
from harness.server.settings import ServerSettings
from harness.shards.directory import ShardDirectory
from harness.shards.placement import ShardLoad
from harness.shards.shard import STANDING_PATH
from harness.shards.standing import ShardCounts, Standing, StandingAnswer, ToldStanding, standing_of

VERB_S = 2.5
"""How long a shard may take for its part in a verb: less than the third of ten seconds that `GateClient` gives one
attempt, so that a shard which hangs costs the others nothing."""

_EVERY_S = 1.0  # between two tellings when nothing changes
_ON_THIS_MACHINE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # nothing is bound here
_NEVER_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)

log = get_logger(__name__)

_T = TypeVar("_T")


class ShardAnswer(NamedTuple):
    """The answer of a shard to one request."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def require(self, also: int = HTTPStatus.OK) -> None:
        """Raises `ShardUnavailable`, with what the shard said, unless it did what was asked or answered `also`."""
        if not (HTTPStatus.OK <= self.status < HTTPStatus.MULTIPLE_CHOICES or self.status == also):
            raise ShardUnavailable(f"it answered {self.status} {self.body[:300].decode(errors='replace')}")

    def read(self, kind: type[_T], also: int = HTTPStatus.OK) -> _T:
        """The body as a `kind`. Raises `ShardUnavailable` when it is none, and as `require` does."""
        self.require(also)
        try:
            return msgspec.json.decode(self.body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ShardUnavailable(f"unexpected answer: {error}") from error


class ShardLink:
    """The link to shard `number`, which is told what `gatekeeper` and `directory` say."""

    def __init__(
        self,
        number: int,
        http: aiohttp.ClientSession,
        gatekeeper: Gatekeeper,
        directory: ShardDirectory,
        settings: ServerSettings,
    ) -> None:
        self.number = number
        self.url = ""
        """Where it answers to its front; empty while it is being started."""
        self.counts: ShardCounts | None = None
        """Of its last answer; None while it does not serve."""
        self.problem = "is being started"
        """Why it does not serve; empty while it does."""
        self.orphans: set[str] = set()
        """Sessions that it may have, and that nobody knows of: the answer to their creation was lost."""
        self.sessions_closed = 0
        """By drains, as long as this link has been there."""
        self.released = 0
        """Requests that opening its gate let go on, likewise."""
        self._placed = 0
        self._http = http
        self._gatekeeper = gatekeeper
        self._directory = directory
        self._host = _ON_THIS_MACHINE.get(settings.host, settings.host)
        self._headers = {"authorization": f"Bearer {settings.admin_token}"} if settings.admin_token else {}
        self._one_at_a_time = asyncio.Lock()  # a shard must not hear how things were after it heard how they are
        self._start = secrets.token_hex(8)
        self._telling = 0
        self._told: Standing | None = None

    @property
    def port(self) -> int:
        """Where it answers to everybody, whichever process it is."""
        return self._directory.record.ports[self.number]

    @property
    def load(self) -> ShardLoad | None:
        """What it carries; None while it does not serve."""
        return None if self.counts is None else ShardLoad(self.number, self.counts.sessions, self._placed)

    def came_up(self) -> None:
        """A process answers, shut until it is told how to stand."""
        self.url = str(URL.build(scheme="http", host=self._host, port=self.port))
        self._told, self.problem = None, "has not been told how to stand"
        self._gatekeeper.look_again()

    def went_down(self, problem: str) -> None:
        """No process answers."""
        self.url, self._told = "", None
        self._fall_silent(problem)

    def place(self) -> None:
        """A session goes there."""
        self._placed += 1

    async def tell(self) -> ShardCounts:
        """Have it stand as the gate does now; its answer. Raises `ShardUnavailable`, `StoreError`."""
        async with self._one_at_a_time:
            while owes := self._directory.owes(self.number):
                await self._tell(standing_of(self._gatekeeper.gate, owes=owes))
                self._directory.note_drained(self.number, owes)
            return await self._tell(standing_of(self._gatekeeper.gate, owes=0))

    async def keep_in_step(self) -> None:
        """Tell it, for ever."""
        while True:
            await self._gatekeeper.until(lambda: bool(self.url))
            await within(_EVERY_S, self._gatekeeper.until(self._is_behind))
            if not self.url:
                continue
            try:
                async with asyncio.timeout(VERB_S):
                    await self.tell()
                    await self._delete_orphans()
            except TimeoutError:
                self._fall_silent(not_in_time(VERB_S))
            except HarnessError as error:
                self._fall_silent(error.message)
            if self.problem:
                await asyncio.sleep(_EVERY_S / 4)

    async def ask_while_it_serves(self, method: str, path: str, body: bytes) -> ShardAnswer:
        """As `ask`; raises `ShardLost` as soon as it falls silent, though its connection stays."""
        asking = asyncio.ensure_future(self.ask(method, path, body))
        asking.add_done_callback(read_end)
        silence = asyncio.ensure_future(self._gatekeeper.until(lambda: self.counts is None))
        try:
            await asyncio.wait({asking, silence}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return asking.result()
            raise ShardLost(f"shard {self.number} {self.problem}")
        finally:
            asking.cancel()
            silence.cancel()
            await asyncio.wait({asking, silence})

    async def ask(self, method: str, path: str, body: bytes | None = None) -> ShardAnswer:
        """Its whole answer to one request, as the operator; the caller bounds it. Raises as `answer` does."""
        async with self.answer(method, path, body) as response:
            return ShardAnswer(response.status, response.headers, await response.read())

    @asynccontextmanager
    async def answer(
        self, method: str, path: str, body: bytes | None = None, *, accept: str = "*/*", silence_s: float | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Its answer as it arrives, in the block.

        Raises `ShardUnavailable` when it was not reached, `ShardLost` when it was and went away, or said nothing for
        `silence_s`.
        """
        if not self.url:
            raise ShardUnavailable(f"shard {self.number} {self.problem}")
        headers = {**self._headers, "accept": accept}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=VERB_S, sock_read=silence_s)
        try:
            async with self._http.request(
                method, URL(f"{self.url}{path}", encoded=True), data=body, headers=headers, timeout=timeout
            ) as response:
                yield response
        except (aiohttp.ClientError, TimeoutError) as error:
            said = f"{type(error).__name__} {error}".rstrip()
            self._fall_silent(said)  # until it answers a telling: nobody is sent there before
            was_sent = not isinstance(error, _NEVER_SENT)
            raise (ShardLost if was_sent else ShardUnavailable)(f"shard {self.number}: {said}") from error

    def _is_behind(self) -> bool:
        gate = self._gatekeeper.gate
        return not self.url or self._told != standing_of(gate, owes=self._directory.owes(self.number))

    async def _tell(self, standing: Standing) -> ShardCounts:
        self._telling += 1
        told = ToldStanding(self._start, self._telling, standing)
        answer = (await self.ask("PUT", STANDING_PATH, msgspec.json.encode(told))).read(StandingAnswer)
        if (answer.start, answer.telling) != (told.start, told.telling):
            raise ShardUnavailable(
                f"it stands as somebody else has told it (PUT {STANDING_PATH}, telling {answer.telling} of"
                f" {answer.start!r}), not as its front has: kill it, and it is started again"
            )
        counts = answer.counts
        if self.problem:
            log.info("shard_serves", shard=self.number, url=self.url, sessions=counts.sessions)
        self.counts, self.problem, self._told, self._placed = counts, "", standing, 0
        self.sessions_closed += counts.sessions_closed
        self.released += counts.released
        return counts

    def _fall_silent(self, problem: str) -> None:
        if problem != self.problem:
            log.warning("shard_silent", shard=self.number, problem=problem)
        self.counts, self.problem = None, problem
        self._gatekeeper.look_again()

    async def _delete_orphans(self) -> None:
        for session_id in list(self.orphans):
            (await self.ask("DELETE", f"/sessions/{session_id}")).require()
            self.orphans.discard(session_id)

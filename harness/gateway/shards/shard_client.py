"""A front's links to its shards, each with address, gate state, and counts, and requests to all of them at once.

The front sends its gate state on every change and once a second. A shard *serves* once it has answered the last state.
Until then the front retries, places no session there, and each verb waits for its deadline and reports a problem.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Generic, NamedTuple, TypeVar

import aiohttp
import msgspec
from yarl import URL

from harness.decoding import read_json
from harness.errors import HarnessError, ShardLost, ShardUnavailable
from harness.gateway.shards.directory import ShardDirectory
from harness.gateway.shards.placement import choose_shard
from harness.gateway.shards.shard import (
    STATE_PATH,
    DesiredState,
    DesiredStateAnswer,
    SentState,
    ShardCounts,
    desired_state_of,
)
from harness.machine.deadlines import not_in_time, read_end, within
from harness.machine.log import get_logger
from harness.server.gatekeeper import Gatekeeper
from harness.server.settings import ServerSettings
from harness.sessions.shard_ids import find_shard

# Less than a third of the 10 s of one `GateClient` attempt, so that a hanging shard does not delay the others.
VERB_S = 2.5
"""Deadline of a shard for its part in a verb."""

_EVERY_S = 1.0  # between two states when nothing changes
_ON_THIS_MACHINE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # no socket is bound here
_NEVER_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)

log = get_logger(__name__)

_T = TypeVar("_T")


class ShardAnswer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    def require(self, also: int = HTTPStatus.OK) -> None:
        """Raise `ShardUnavailable` unless the status is 2xx or `also`."""
        if not (HTTPStatus.OK <= self.status < HTTPStatus.MULTIPLE_CHOICES or self.status == also):
            raise ShardUnavailable(f"it answered {self.status} {self.body[:300].decode(errors='replace')}")

    def read(self, kind: type[_T], also: int = HTTPStatus.OK) -> _T:
        """Call `require`, then decode the body. Raises `ShardUnavailable`."""
        self.require(also)
        try:
            return read_json(self.body, kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ShardUnavailable(f"unexpected answer: {error}") from error


class ShardClient:
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
        """Address for its front; empty while it starts."""
        self.counts: ShardCounts | None = None
        """Last counts; None while it does not serve."""
        self.problem = "is being started"
        """Reason it does not serve, or empty."""
        self.orphans: set[str] = set()
        """Sessions to delete: the answer to their creation was lost."""
        self.sessions_closed = 0
        """Sessions that drains closed, since this link exists."""
        self.released = 0
        """Requests that opening the gate released, since this link exists."""
        self.placed = 0
        """Sessions placed since the last counts."""
        self._counted = ShardCounts()
        self._http = http
        self._gatekeeper = gatekeeper
        self._directory = directory
        self._host = _ON_THIS_MACHINE.get(settings.host, settings.host)
        self._headers = {"authorization": f"Bearer {settings.admin_token}"} if settings.admin_token else {}
        self._one_at_a_time = asyncio.Lock()  # an old state must not arrive after a newer one
        self._start = secrets.token_hex(8)
        self._telling = 0
        self._told: DesiredState | None = None

    @property
    def port(self) -> int:
        """Public port, which a restart keeps."""
        return self._directory.record.ports[self.number]

    @property
    def load(self) -> int | None:
        """Sessions, `placed` ones included; None while it does not serve."""
        return None if self.counts is None else self.counts.sessions + self.placed

    def came_up(self) -> None:
        """Record that a process answers; its gate stays closed until `tell`."""
        self.url = str(URL.build(scheme="http", host=self._host, port=self.port))
        self._told, self.problem = None, "has no gate state yet"
        self._counted = ShardCounts()
        self._gatekeeper.look_again()

    def went_down(self, problem: str) -> None:
        self.url, self._told = "", None
        self._fall_silent(problem)

    async def tell(self) -> ShardCounts:
        """Send the gate state and return the counts. Raises `ShardUnavailable`, `StoreError`."""
        # States are sent one at a time, each built just before it is sent. So on return, the shard has the gate state
        # of the time of the call, or a later one.
        async with self._one_at_a_time:
            # While the shard owes a drain it gets a closed gate, so that no newer session falls under that drain.
            while owes := self._directory.owes(self.number):
                await self._tell(desired_state_of(self._gatekeeper.gate, owes=owes))
                self._directory.note_drained(self.number, owes)
            return await self._tell(desired_state_of(self._gatekeeper.gate, owes=0))

    async def keep_in_step(self) -> None:
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
        """Send a request as `ask`. Raises `ShardLost` once the shard stops serving, even if still connected."""
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
        """Send a request as the operator. The caller sets a timeout. Raises as `answer`."""
        async with self.answer(method, path, body) as response:
            return ShardAnswer(response.status, response.headers, await response.read())

    @asynccontextmanager
    async def answer(
        self, method: str, path: str, body: bytes | None = None, *, accept: str = "*/*", silence_s: float | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and yield the response as it arrives.

        Raises `ShardUnavailable` if the shard was not reached, `ShardLost` if it then disconnected or was silent for
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
            self._fall_silent(said)  # until it answers a new state, so no session goes there before
            was_sent = not isinstance(error, _NEVER_SENT)
            raise (ShardLost if was_sent else ShardUnavailable)(f"shard {self.number}: {said}") from error

    def _is_behind(self) -> bool:
        gate = self._gatekeeper.gate
        return not self.url or self._told != desired_state_of(gate, owes=self._directory.owes(self.number))

    async def _tell(self, standing: DesiredState) -> ShardCounts:
        self._telling += 1
        told = SentState(self._start, self._telling, standing)
        answer = (await self.ask("PUT", STATE_PATH, msgspec.json.encode(told))).read(DesiredStateAnswer)
        if (answer.start, answer.telling) != (told.start, told.telling):
            raise ShardUnavailable(
                f"another front has set its gate (PUT {STATE_PATH}, telling {answer.telling} of"
                f" {answer.start!r}), not its own front: kill the shard, and it restarts"
            )
        counts = answer.counts
        if self.problem:
            log.info("shard_serves", shard=self.number, url=self.url, sessions=counts.sessions)
        self.counts, self.problem, self._told, self.placed = counts, "", standing, 0
        self.sessions_closed += counts.sessions_closed - self._counted.sessions_closed
        self.released += counts.released - self._counted.released
        self._counted = counts
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


class ShardAnswers(NamedTuple, Generic[_T]):
    answers: dict[int, _T]
    problems: tuple[str, ...]
    """A line for each shard that failed."""

    @property
    def some(self) -> list[_T]:
        """Nonempty results. Raises `ShardUnavailable` if every shard failed."""
        if not self.answers:
            raise ShardUnavailable(f"all shards failed: {'; '.join(self.problems)}")
        return list(self.answers.values())


class ShardClients:
    def __init__(self, links: Sequence[ShardClient]) -> None:
        self._links = links

    def __len__(self) -> int:
        return len(self._links)

    def __iter__(self) -> Iterator[ShardClient]:
        return iter(self._links)

    def find(self, digits: str) -> ShardClient:
        """Return the shard of a session id, or of a key without its prefix."""
        return self._links[find_shard(digits, len(self))]

    def choose(self, only: int | None) -> ShardClient | None:
        """Return the shard for a new session, which is `only` if given, or None if none serves."""
        loads = {link.number: link.load for link in self._links if only in (None, link.number)}
        number = choose_shard({number: load for number, load in loads.items() if load is not None})
        return None if number is None else self._links[number]

    async def fetch(
        self, kind: type[_T], seconds: float, path: str, body: bytes | None = None, *, also: int = HTTPStatus.OK
    ) -> ShardAnswers[_T]:
        """GET `path` from each shard, or POST `body` there; for `kind` and `also` see `ShardAnswer.read`."""

        async def ask(link: ShardClient) -> _T:
            return (await link.ask("GET" if body is None else "POST", path, body)).read(kind, also)

        return await self.ask(ask, seconds)

    async def ask(self, call: Callable[[ShardClient], Awaitable[_T]], seconds: float) -> ShardAnswers[_T]:
        """Call `call` for each link, for at most `seconds`."""

        async def ask(link: ShardClient) -> _T | str:
            try:
                async with asyncio.timeout(seconds):
                    return await call(link)
            except TimeoutError:
                return not_in_time(seconds)
            except HarnessError as error:
                return error.message

        found = await asyncio.gather(*map(ask, self._links))
        said = dict(zip((link.number for link in self._links), found, strict=True))
        problems = tuple(
            answer if answer.startswith(f"shard {number}") else f"shard {number}: {answer}"
            for number, answer in said.items()
            if isinstance(answer, str)
        )
        return ShardAnswers(
            {number: answer for number, answer in said.items() if not isinstance(answer, str)}, problems
        )

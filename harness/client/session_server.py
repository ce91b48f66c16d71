"""One session server from the outside: its sessions, its gate, and its part in a weight update.

    async with SessionServerClient(SessionServerAddress(url, admin_token)) as server:
        session = await server.create({})
        gate = await server.gate().report(deadline_s=10)

Every verb has a deadline and raises `SessionServerError`. Creating is not idempotent, so it is repeated only when the
server said no (503) or was never reached; the other verbs of a session are repeated after any failure of transport or
gateway. A sweep is not repeated: asking twice costs the time that it is meant to save, and what it did not reach is
counted anyway. The gate and holds on it: `gate.py`.
"""

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import quote, urlencode

import msgspec
from tenacity import AsyncRetrying, retry_if_exception, stop_before_delay, wait_exponential

from harness.client.connections import (
    BRIEF,
    HELD,
    LARGE,
    NOT_DECODABLE,
    Connections,
    Room,
    SessionServerAddress,
    decode,
)
from harness.client.gate import HOLD_TTL_S, GateClient
from harness.errors import RunError, SessionServerError, StoreFull
from harness.samples.codec import samples_from_tensors
from harness.samples.turn_rewards import TurnRewards, reward_turns
from harness.sessions.hold_times import HoldTime
from harness.sessions.lifecycle import RolloutEnd
from harness.sessions.weights.weight_update import ExpectedWeights, LiveWeights, SweepReport, SweepRequest
from harness.turn_ends import TurnStatus
from harness.types import Json, Sample

Futures = Collection[asyncio.Future[None]]

_DOUBLING = wait_exponential(0.1, max=5.0)  # seconds of pauses


class SessionHandle(msgspec.Struct, frozen=True):
    """A session as `POST /sessions` gives it out."""

    session_id: str
    base_url: str
    """Ends in `/sessions/<id>`; OpenAI clients append `/v1`."""
    api_key: str


class SessionFacts(msgspec.Struct, frozen=True):
    """Tells how a rollout ended, and whether turns of it are still in flight."""

    phase: str
    turns: dict[TurnStatus, int] = msgspec.field(default_factory=dict)
    """Recorded turns by their status."""
    refusals: dict[str, int] = msgspec.field(default_factory=dict)
    turns_in_flight: int = 0


class ServerDescription(msgspec.Struct, frozen=True):
    """A session server, as it describes itself."""

    harness: str
    """Its version."""
    start: str
    """Another one after every start."""
    serves: dict[str, Any]
    """Engine and model by name, weights, tokenizer, template and repeat guard by digest."""
    engines: list[str]
    """The programs that sample, with their versions."""
    tokenizer: str = ""
    """Its folder, on the machine of the server."""


class SessionSummary(msgspec.Struct, frozen=True):
    """A session in the list of all."""

    session_id: str
    phase: str
    turns: int
    """How many are recorded."""
    turns_in_flight: int
    state: str = ""
    """What it waits for now, a `SessionState`; empty where the server is too old to say."""
    tokens: int = 0
    """Sampled so far, those of turns in flight included as far as they have come."""
    created_at: float = 0.0
    """Unix seconds."""


class SessionTotals(msgspec.Struct, frozen=True):
    """All sessions of a server together."""

    states: dict[str, int] = {}
    """How many wait for what."""
    turns: int = 0
    """Recorded since the server was started."""
    tokens: int = 0
    """Sampled since then, in the sessions that are gone, too."""


class SampledBy(msgspec.Struct, frozen=True):
    """An engine server, or the engine, behind a session server."""

    name: str
    """Its URL; empty for an engine on its own."""
    weight_version: str
    fence: str
    """Why it serves no session; empty while it does."""
    in_flight: int
    sessions: int
    """Sessions that were served there last."""
    shard: int | None = None
    """That whose worker it is, at a front: shards may have the same workers."""


class SessionList(msgspec.Struct, frozen=True):
    """Sessions of a server, with the totals of all."""

    sessions: list[SessionSummary]
    totals: SessionTotals = SessionTotals()
    workers: list[SampledBy] = []
    problems: list[str] = []
    """Of a front, the shards that have not answered."""


class HoldTimes(msgspec.Struct, frozen=True):
    """Holds that are or were on the gate."""

    now: float
    """By the clock of the server, Unix seconds: ask with it for what comes later."""
    holds: list[HoldTime]


class TurnTime(msgspec.Struct, frozen=True, array_like=True):
    """When a turn was under way."""

    index: int
    began_at: float
    """Its admission, Unix seconds by the clock of the server."""
    seconds: float | None
    """None of a turn in flight."""
    status: str
    """`in_flight` of a turn without one."""


class TurnTimes(msgspec.Struct, frozen=True):
    """Times of turns, by session."""

    now: float
    times: dict[str, list[TurnTime]]
    left_off: list[str] = []
    """Sessions that it is too long for: ask for them again."""
    problems: list[str] = []
    """Of a front, the shards that have not answered."""


class RoutedWorker(NamedTuple):
    """A worker of a router, as the router knows it."""

    url: str
    engine: str | None
    """The kind of engine; None while the worker has never answered."""
    is_serving: bool
    """Sessions are served by it."""


class Collected(NamedTuple):
    """Everything a rollout is made of, as the server had it at one moment."""

    facts: SessionFacts
    session: Json
    """The record, without token columns."""
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long each step around a session may take, repetitions included."""

    create_s: float = 120.0
    """Long enough for a paused or draining gate to open again; one request may use up all of it."""
    attempt_s: float = 30.0
    """For one request of the other steps, before it is made again."""
    read_s: float = 60.0
    end_s: float = 10.0
    """How long turns in flight, which are told to end with their agent, are waited for before the session is read."""
    delete_s: float = 5.0
    """Short: it runs while a rollout is being cancelled. A session that could not be deleted stays on the server."""


class SessionServerClient:
    """The server at `address`; safe for concurrent use, a context manager that closes its connections."""

    def __init__(self, address: SessionServerAddress | str, *, deadlines: Deadlines | None = None) -> None:
        self.address = SessionServerAddress(address) if isinstance(address, str) else address
        self.deadlines = deadlines or Deadlines()
        """How long each step may take."""
        self._connections = Connections(self.address, silence_s=self.deadlines.attempt_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection; what is asked afterwards fails."""
        await self._connections.close()

    # Sessions

    async def create(self, body: Json, *, give_up: Futures = ()) -> SessionHandle:
        """A session made from `body`, waiting for the gate when it is shut, until one of `give_up` is done.

        The server holds the request while its gate is paused, and a creation that got no answer cannot be made again:
        so it waits for its answer as long as it has time.
        """
        deadline_s = self.deadlines.create_s
        content = await self._call(HELD, "POST", "/sessions", body, deadline_s=deadline_s, give_up=give_up)
        return decode(content, SessionHandle)

    async def sessions(self) -> list[SessionSummary]:
        """Every session that the server holds."""
        return (await self.list_all(deadline_s=self.deadlines.read_s)).sessions

    async def list_all(self, *, deadline_s: float) -> SessionList:
        """Every session that the server holds, and of a front the shards that have not said which they hold."""
        return decode(await self._call(BRIEF, "GET", "/sessions", deadline_s=deadline_s), SessionList)

    async def busiest(self, limit: int, *, deadline_s: float) -> SessionList:
        """So many of the sessions: those in an engine first, then those that wait."""
        return decode(await self._call(BRIEF, "GET", f"/sessions?limit={limit}", deadline_s=deadline_s), SessionList)

    async def look(self, session_ids: Sequence[str], *, deadline_s: float) -> list[SessionSummary]:
        """How those of the sessions stand that the server holds; it takes up to 100 ids."""
        if not session_ids:
            return []
        query = "&".join(f"id={quote(session_id, safe='')}" for session_id in session_ids)
        return decode(await self._call(BRIEF, "GET", f"/sessions?{query}", deadline_s=deadline_s), SessionList).sessions

    async def facts(self, session_id: str) -> SessionFacts:
        """How the session stands; phase `unknown` when the server does not know it."""
        path = f"/sessions/{session_id}/facts"
        return decode(await self._call(BRIEF, "GET", path, deadline_s=self.deadlines.read_s), SessionFacts)

    async def times(self, since: Mapping[str, int], *, deadline_s: float) -> TurnTimes:
        """When turns were under way, of each session from that index on, and of earlier ones that went on again.

        It takes up to 100 ids. Sessions that are gone or paged out are not in it.
        """
        query = "&".join(f"from={quote(session_id, safe='')}:{turn}" for session_id, turn in since.items())
        content = await self._call(BRIEF, "GET", f"/sessions/times?{query}", deadline_s=deadline_s)
        return decode(content, TurnTimes)

    async def record(self, session_id: str, since: int = 0) -> Json:
        """The session's record with its token columns; an empty one of phase `unknown` when the server has none.

        Of turns before `since` it has what later turns can change.
        """
        path = f"/sessions/{session_id}" + (f"?since={since}" if since else "")
        return decode(await self._call(LARGE, "GET", path, deadline_s=self.deadlines.read_s), Json)

    async def collect(self, session_id: str, *, turn_rewards: TurnRewards | None = None) -> Collected:
        """Facts, record and samples of one moment; empty ones when the server does not know the session.

        `turn_rewards` are stamped on the samples. Raises `ScenarioError` for a turn that is not there or not trained.
        """
        path = f"/sessions/{session_id}/samples?format=safetensors"
        content = await self._call(LARGE, "GET", path, deadline_s=self.deadlines.read_s)
        try:
            samples, about = samples_from_tensors(content)
            answer = msgspec.convert(about, _CollectedAnswer)
        except (*NOT_DECODABLE, RunError) as error:
            raise SessionServerError(f"unexpected answer: {error}", code="invalid_answer") from error
        return Collected(answer.facts, answer.session, reward_turns(samples, answer.session, turn_rewards or {}))

    async def end(self, session_id: str, *, within_s: float) -> SessionFacts:
        """The session accepts no further turn, and its turns in flight end; how it stands then, or after `within_s`."""
        path, deadline_s = f"/sessions/{session_id}/end", self.deadlines.read_s + within_s
        content = await self._call(HELD, "POST", path, {"within_s": within_s}, deadline_s=deadline_s)
        return decode(content, SessionFacts)

    async def delete(self, session_id: str, end: RolloutEnd | None = None) -> None:
        """The session is gone from the server, whose store keeps `end`; idempotent."""
        told = {} if end is None else {name: value for name, value in end._asdict().items() if value not in (None, "")}
        query = f"?{urlencode(told)}" if told else ""
        await self._call(BRIEF, "DELETE", f"/sessions/{session_id}{query}", deadline_s=self.deadlines.delete_s)

    async def drain(self, session_id: str) -> SessionFacts:
        """The session alone accepts no further turn, for good, as after a drain of all; how it stands then."""
        path = f"/sessions/{session_id}/drain"
        return decode(await self._call(BRIEF, "POST", path, deadline_s=self.deadlines.read_s), SessionFacts)

    # The server

    async def describe(self, *, deadline_s: float) -> ServerDescription:
        """The server's description of itself and of the model it serves."""
        return decode(await self._call(BRIEF, "GET", "/sessions/server", deadline_s=deadline_s), ServerDescription)

    # The gate and the weights

    def gate(self, holder: str = "", ttl_s: float = HOLD_TTL_S) -> GateClient:
        """The gate, turned under the name `holder`; see `GateClient`."""
        return GateClient(self.address.url, self._connections, holder, ttl_s)

    async def hold_times(self, since: float = 0.0, *, deadline_s: float) -> HoldTimes:
        """When holds were on the gate, from `since` on: as far as the server remembers."""
        content = await self._call(BRIEF, "GET", f"/sessions/holds?since={since}", deadline_s=deadline_s)
        return decode(content, HoldTimes)

    async def sweep(self, request: SweepRequest) -> SweepReport:
        """Score what waits for the live version; answers when that is done or its budget used up.

        The caller bounds it.
        """
        return decode(await self._post_once("/sessions/sweep", request), SweepReport)

    async def expect(self, version: int) -> LiveWeights:
        """Have the server ask its workers what they serve, and fence those that do not serve `version`.

        The caller bounds it.
        """
        return decode(await self._post_once("/sessions/weights", ExpectedWeights(version)), LiveWeights)

    # The router that the server may be

    async def list_routed_workers(self, *, deadline_s: float) -> list[RoutedWorker]:
        """The workers that a `harness router` lists; a server that is none answers 404."""
        answer = decode(await self._call(BRIEF, "GET", "/router", deadline_s=deadline_s), _RouterAnswer)
        serving = {worker.name for worker in answer.sessions.workers if not worker.fence}
        return [RoutedWorker(each.url, each.engine, each.url in serving) for each in answer.workers]

    async def _post_once(self, path: str, body: msgspec.Struct) -> bytes:
        return await self._connections.ask(HELD, "POST", path, msgspec.to_builtins(body), timeout_s=None)

    async def _call(
        self,
        room: Room,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        deadline_s: float,
        give_up: Futures = (),
    ) -> bytes:
        """The content of a successful answer; raises the last `SessionServerError` when `deadline_s` is over."""
        deadline = time.monotonic() + deadline_s
        failed: list[SessionServerError] = []

        async def ask() -> bytes:
            if failed and has_given_up():
                raise failed[-1]
            try:
                return await self._connections.ask(room, method, path, body, timeout_s=deadline - time.monotonic())
            except SessionServerError as error:
                failed.append(error)
                raise

        def has_given_up() -> bool:
            return any(future.done() for future in give_up)

        async def rest(seconds: float) -> None:
            never = asyncio.get_running_loop().create_future()
            await asyncio.wait({*give_up, never}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)

        return await AsyncRetrying(
            retry=retry_if_exception(_may_create if (method, path) == ("POST", "/sessions") else _may_repeat),
            wait=lambda state: max(_DOUBLING(state), failed[-1].retry_after_s),
            stop=lambda state: has_given_up() or stop_before_delay(deadline_s)(state),
            sleep=rest,
            reraise=True,
        )(ask)


def _may_repeat(error: BaseException) -> bool:
    return isinstance(error, SessionServerError) and error.retryable


def _may_create(error: BaseException) -> bool:
    """Whether nothing was created; on a full disk no wait is long enough, an operator has to free space first."""
    return isinstance(error, SessionServerError) and error.was_refused and error.code != StoreFull.code


class _Listed(msgspec.Struct):
    url: str
    engine: str | None


class _InPool(msgspec.Struct):
    name: str
    fence: str


class _Pool(msgspec.Struct):
    workers: list[_InPool]


class _RouterAnswer(msgspec.Struct):
    workers: list[_Listed]
    sessions: _Pool


class _CollectedAnswer(msgspec.Struct):
    facts: SessionFacts
    session: Json

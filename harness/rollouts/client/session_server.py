"""Client of one session server.

    async with SessionServerClient(SessionServerAddress(url, admin_token)) as server:
        session = await server.create({})
        gate = await server.gate().report(deadline_s=10)

Creating is not idempotent, so it is retried only after a 503 or without contact. Other verbs are retried after
transport and gateway failures, sweeps never.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeVar
from urllib.parse import quote, urlencode

import msgspec
from tenacity import AsyncRetrying, retry_if_exception, stop_before_delay, wait_exponential

from harness.decoding import convert
from harness.errors import HarnessError, RunError, SessionServerError, StoreFull
from harness.rollouts.client.connections import (
    BRIEF,
    HELD,
    LARGE,
    NOT_DECODABLE,
    ConnectionRoom,
    Connections,
    SessionServerAddress,
    decode,
)
from harness.rollouts.client.gate import HOLD_TTL_S, GateClient
from harness.samples.codec import samples_from_tensors
from harness.samples.turn_rewards import TurnRewards, reward_turns
from harness.sessions.hold_times import HoldTime
from harness.sessions.lifecycle import RolloutEnd
from harness.sessions.record import empty_record
from harness.sessions.weights.weight_update import ExpectedWeights, LiveWeights, SweepReport, SweepRequest
from harness.token_rows import RoutedExperts
from harness.turn_ends import TurnStatus
from harness.types import Json, Sample

Futures = Collection[asyncio.Future[None]]

_T = TypeVar("_T")

GREETING_S = 5.0
"""Time for a server to answer at all, in case of a mistyped address."""
_DOUBLING = wait_exponential(0.1, max=5.0)  # seconds of pauses


class SessionHandle(msgspec.Struct, frozen=True):
    session_id: str
    base_url: str
    """URL ending in `/sessions/<id>`; OpenAI clients append `/v1`."""
    api_key: str


class SessionFacts(msgspec.Struct, frozen=True):
    phase: str
    turns: dict[TurnStatus, int] = msgspec.field(default_factory=dict)
    """Recorded turns by status."""
    refusals: dict[str, int] = msgspec.field(default_factory=dict)
    turns_in_flight: int = 0


class ServerDescription(msgspec.Struct, frozen=True):
    harness: str
    start: str
    """Id that changes with every start."""
    serves: dict[str, Any]
    """Names of engine and model, digests of the rest."""
    engines: list[str]
    """Sampling programs and versions."""
    tokenizer: str = ""
    """Folder on the server."""
    routed_experts: RoutedExperts | None = None
    max_mask_ids: int = 0


class SessionSummary(msgspec.Struct, frozen=True):
    session_id: str
    phase: str
    turns: int
    turns_in_flight: int
    state: str = ""
    """`SessionState`; empty from an old server."""
    tokens: int = 0
    """Sampled so far, turns in flight included."""
    created_at: float = 0.0
    """Unix seconds."""


class SessionTotals(msgspec.Struct, frozen=True):
    states: dict[str, int] = {}
    turns: int = 0
    """Recorded since the start."""
    tokens: int = 0
    """Sampled since the start, deleted sessions included."""


class SampledBy(msgspec.Struct, frozen=True):
    name: str
    """URL; empty for a single engine."""
    weight_version: str
    fence: str
    """Reason why it serves no session."""
    in_flight: int
    sessions: int
    shard: int | None = None
    """Shard of the worker, at a front."""


class SessionList(msgspec.Struct, frozen=True):
    sessions: list[SessionSummary]
    totals: SessionTotals = SessionTotals()
    workers: list[SampledBy] = []
    problems: list[str] = []
    """Silent shards of a front."""


class ReportedHolds(msgspec.Struct, frozen=True):
    now: float
    """Server's clock, Unix seconds; the next `since`."""
    holds: list[HoldTime]


class TurnTime(msgspec.Struct, frozen=True, array_like=True):
    index: int
    began_at: float
    """Admission, Unix seconds of the server."""
    seconds: float | None
    """None while in flight."""
    status: str
    """Status, or `in_flight`."""


class TurnTimes(msgspec.Struct, frozen=True):
    now: float
    times: dict[str, list[TurnTime]]
    left_off: list[str] = []
    """Sessions omitted for length; send another request."""
    problems: list[str] = []
    """Silent shards of a front."""


class RoutedWorker(NamedTuple):
    url: str
    engine: str | None
    """Engine kind; None until it has answered."""
    is_serving: bool


class Collected(NamedTuple):
    facts: SessionFacts
    session: Json
    samples: tuple[Sample, ...] = ()
    lost: str | None = None
    """Reason for no record."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    create_s: float = 120.0
    """Long enough for a paused gate."""
    attempt_s: float = 30.0
    """Time for one request of the other steps."""
    read_s: float = 60.0
    end_s: float = 10.0
    """Time for turns in flight to end."""
    delete_s: float = 5.0
    """Time to delete; short, since it delays cancellation."""


class SessionServerClient:
    """Client, safe for concurrent use."""

    def __init__(self, address: SessionServerAddress | str, *, deadlines: Deadlines | None = None) -> None:
        self.address = SessionServerAddress(address) if isinstance(address, str) else address
        self.deadlines = deadlines or Deadlines()
        self._connections = Connections(self.address, silence_s=self.deadlines.attempt_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._connections.close()

    async def create(self, body: Json, *, give_up: Futures = ()) -> SessionHandle:
        """Create a session, waiting at a shut gate until one of `give_up` is done."""
        # A creation that got no answer cannot be repeated, so one request may wait the whole time.
        deadline_s = self.deadlines.create_s
        content = await self._call(HELD, "POST", "/sessions", body, deadline_s=deadline_s, give_up=give_up)
        return decode(content, SessionHandle)

    async def sessions(self) -> list[SessionSummary]:
        return (await self.list_all(deadline_s=self.deadlines.read_s)).sessions

    async def list_all(self, *, deadline_s: float) -> SessionList:
        return await self._read("/sessions", SessionList, deadline_s)

    async def busiest(self, limit: int, *, deadline_s: float) -> SessionList:
        """List `limit` sessions, those in an engine first."""
        return await self._read(f"/sessions?limit={limit}", SessionList, deadline_s)

    async def look(self, session_ids: Sequence[str], *, deadline_s: float) -> list[SessionSummary]:
        """Read up to 100 sessions; absent ones are omitted."""
        if not session_ids:
            return []
        query = "&".join(f"id={quote(session_id, safe='')}" for session_id in session_ids)
        return (await self._read(f"/sessions?{query}", SessionList, deadline_s)).sessions

    async def facts(self, session_id: str) -> SessionFacts:
        """Read a session's state; phase `unknown` if missing."""
        return await self._read(f"/sessions/{session_id}/facts", SessionFacts, self.deadlines.read_s)

    async def times(self, since: Mapping[str, int], *, deadline_s: float) -> TurnTimes:
        """Read turn times of up to 100 sessions in memory from these indexes on, and of resumed turns."""
        query = "&".join(f"from={quote(session_id, safe='')}:{turn}" for session_id, turn in since.items())
        return await self._read(f"/sessions/times?{query}", TurnTimes, deadline_s)

    async def record(self, session_id: str, since: int = 0) -> Json:
        """Read the record; phase `unknown` if missing. Turns before `since` hold only what may change."""
        path = f"/sessions/{session_id}" + (f"?since={since}" if since else "")
        return decode(await self._call(LARGE, "GET", path, deadline_s=self.deadlines.read_s), Json)

    async def collect(self, session_id: str, *, turn_rewards: TurnRewards | None = None) -> Collected:
        """Read facts, record and samples of one moment, empty if missing. Raises `ScenarioError` for `turn_rewards`."""
        path = f"/sessions/{session_id}/samples?format=safetensors"
        content = await self._call(LARGE, "GET", path, deadline_s=self.deadlines.read_s)
        try:
            samples, about = samples_from_tensors(content)
            answer = convert(about, _CollectedAnswer)
        except (*NOT_DECODABLE, RunError) as error:
            raise SessionServerError(f"unexpected answer: {error}", code="invalid_answer") from error
        return Collected(answer.facts, answer.session, reward_turns(samples, answer.session, turn_rewards or {}))

    async def end(self, session_id: str, *, within_s: float) -> SessionFacts:
        """Close the session to turns and end those in flight. Return its state."""
        path, deadline_s = f"/sessions/{session_id}/end", self.deadlines.read_s + within_s
        content = await self._call(HELD, "POST", path, {"within_s": within_s}, deadline_s=deadline_s)
        return decode(content, SessionFacts)

    async def delete(self, session_id: str, end: RolloutEnd | None = None) -> None:
        """Delete the session, storing `end`; idempotent."""
        told = {} if end is None else {name: value for name, value in end._asdict().items() if value not in (None, "")}
        query = f"?{urlencode(told)}" if told else ""
        await self._call(BRIEF, "DELETE", f"/sessions/{session_id}{query}", deadline_s=self.deadlines.delete_s)

    async def drain(self, session_id: str) -> SessionFacts:
        """Drain this session for good. Return its state."""
        path = f"/sessions/{session_id}/drain"
        return decode(await self._call(BRIEF, "POST", path, deadline_s=self.deadlines.read_s), SessionFacts)

    async def describe(self, *, deadline_s: float) -> ServerDescription:
        return await self._read("/sessions/server", ServerDescription, deadline_s)

    def gate(self, holder: str = "", ttl_s: float = HOLD_TTL_S) -> GateClient:
        return GateClient(self.address.url, self._connections, holder, ttl_s)

    async def hold_times(self, since: float = 0.0, *, deadline_s: float) -> ReportedHolds:
        return await self._read(f"/sessions/holds?since={since}", ReportedHolds, deadline_s)

    async def sweep(self, request: SweepRequest) -> SweepReport:
        """Score tokens that wait for the live version. The caller bounds it."""
        return decode(await self._post_once("/sessions/sweep", request), SweepReport)

    async def expect(self, version: int) -> LiveWeights:
        """Have the server fence workers without `version`. The caller bounds it."""
        return decode(await self._post_once("/sessions/weights", ExpectedWeights(version)), LiveWeights)

    async def list_routed_workers(self, *, deadline_s: float) -> list[RoutedWorker]:
        """List a `harness router`'s workers; others answer 404."""
        answer = await self._read("/router", _RouterAnswer, deadline_s)
        serving = {worker.name for worker in answer.sessions.workers if not worker.fence}
        return [RoutedWorker(each.url, each.engine, each.url in serving) for each in answer.workers]

    async def _read(self, path: str, kind: type[_T], deadline_s: float) -> _T:
        return decode(await self._call(BRIEF, "GET", path, deadline_s=deadline_s), kind)

    async def _post_once(self, path: str, body: msgspec.Struct) -> bytes:
        return await self._connections.ask(HELD, "POST", path, msgspec.to_builtins(body), timeout_s=None)

    async def _call(
        self,
        room: ConnectionRoom,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        deadline_s: float,
        give_up: Futures = (),
    ) -> bytes:
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
    # Waiting does not help a full disk: an operator has to free space.
    return isinstance(error, SessionServerError) and error.was_refused and error.code != StoreFull.code


async def read_record(client: SessionServerClient, session_id: str, *, end_s: float) -> Collected:
    """End a session, then read its record: calls in flight belong to it (I4)."""
    try:
        await client.end(session_id, within_s=end_s)
        return await client.collect(session_id)
    except HarnessError as error:
        return Collected(SessionFacts(phase=""), empty_record(None, None), lost=str(error))


def ask_server(address: SessionServerAddress, question: Callable[[SessionServerClient], Awaitable[_T]]) -> _T:
    """Return the answer of a running server, from a program without an event loop. Raises `SessionServerError`."""

    async def ask() -> _T:
        async with SessionServerClient(address) as client:
            await client.describe(deadline_s=GREETING_S)
            return await question(client)

    return asyncio.run(ask())


class _ListedWorker(msgspec.Struct):
    url: str
    engine: str | None


class _Pool(msgspec.Struct):
    workers: list[SampledBy]


class _RouterAnswer(msgspec.Struct):
    workers: list[_ListedWorker]
    sessions: _Pool


class _CollectedAnswer(msgspec.Struct):
    facts: SessionFacts
    session: Json

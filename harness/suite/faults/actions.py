"""Actions of faults: an immediate effect and, for some, a rest that takes time and an undo.

The triggering turn waits for the immediate effect, so it cannot outrun its fault. The rest (a closed gate, a dead
engine, the end of an abort) runs beside the sessions. The undo always follows and acts on the effect's targets: a
stopped agent continues even if the server is gone. Actions and undos without targets raise, as problems of the fault.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from harness.errors import HarnessError
from harness.lab.lanes.lane import START_S
from harness.rollouts.client.session_server import SessionServerClient
from harness.rollouts.control.abort import abort_rollout
from harness.rollouts.control.abort_report import AbortBudget
from harness.rollouts.control.engines import EngineInProcess
from harness.rollouts.control.pause import paused_rollout
from harness.rollouts.manager import SessionManager
from harness.rollouts.outcome import count_words
from harness.samples.rollout import Rollout
from harness.suite.faults.engine_seam import EngineCall, NetworkFault
from harness.suite.faults.seams import KillableServer, Seams
from harness.suite.scenarios.fault import ON_THE_NETWORK, Action, Fault

_GATE_S = 60.0
_AGENTS_S = 2.0
"""Seconds for agents to end by themselves."""
# Long enough for a slow machine, which is not a fault of the scenario. Only hangs exhaust these.
_BUDGET = AbortBudget(drain_s=_GATE_S, engines_s=60.0, collect_s=120.0, resume_s=_GATE_S, total_s=400.0)
_UNDO_S = START_S + _GATE_S
"""Enough to restart an engine server."""

Later = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Effect:
    """An action's immediate effect, in words, and what is left to do."""

    did: str
    rest: Later | None = None
    undo: Later | None = None
    """Runs after `rest`, however that ends."""

    async def finish(self) -> None:
        try:
            if self.rest is not None:
                await self.rest()
        finally:
            if self.undo is not None:
                async with asyncio.timeout(_UNDO_S):
                    await self.undo()


class Moment(NamedTuple):
    """A due fault and its trigger."""

    fault: Fault
    session: int | None
    """Session that triggered it; None for the clock."""
    call: EngineCall | None

    async def last(self) -> None:
        """Wait for the fault's duration."""
        await asyncio.sleep(self.fault.seconds or 0)


@dataclass(slots=True)
class Roster:
    """A scenario's sessions by id and position. Its rollouts are numbered from `first`."""

    scenario: str
    server: KillableServer
    first: int
    seeds: Mapping[int, int]
    _seen: dict[str, int] = field(default_factory=dict)

    def present(self) -> dict[str, int]:
        """Return open sessions and their positions; none while the server is gone."""
        there = {each: self.position_of(number) for each, number in self.server.open_sessions.items()}
        mine = {session_id: position for session_id, position in there.items() if position in self.seeds}
        self._seen |= mine
        return mine

    def position_of(self, number: int) -> int:
        return number - self.first

    def position(self, session_id: str) -> int | None:
        """Return a session's position, even if ended; None for other sessions."""
        if session_id not in self._seen:
            self.present()
        return self._seen.get(session_id)


@dataclass(eq=False)
class Actions:
    seams: Seams
    manager: SessionManager
    roster: Roster

    def __post_init__(self) -> None:
        self.running: dict[asyncio.Task[Rollout], int] = {}
        """Rollouts under way, with the positions of their sessions."""
        self.may_begin = asyncio.Event()
        """Set unless an action keeps rollouts from beginning."""
        self.may_begin.set()
        self.armed: dict[int, list[NetworkFault]] = {}
        """Faults of each session's next request."""
        self._table: Mapping[Action, Callable[[Moment], Awaitable[Effect]]] = {
            "abort_engine": self._abort_engine,
            "drain": self._drain,
            "pause": self._pause,
            "kill_agent": self._kill_agent,
            "stop_agent": self._stop_agent,
            "kill_engine": self._kill_engine,
            "kill_server": self._kill_server,
            "duplicate_request": self._duplicate_request,
            "end_rollout": self._end_rollout,
            **dict.fromkeys(ON_THE_NETWORK, self._arm),
        }

    async def apply(self, moment: Moment) -> Effect:
        """Apply an action's immediate part. Raises `HarnessError`."""
        return await self._table[moment.fault.action](moment)

    # On everything

    async def _drain(self, moment: Moment) -> Effect:
        async with SessionServerClient(self.seams.server.address) as server:
            report = await server.gate().drain(deadline_s=_GATE_S)
        closed, in_flight = count_words(report.sessions_closed, "session"), count_words(report.turns_in_flight, "turn")
        return Effect(f"{closed} closed, {in_flight} in flight", moment.last, self._open_gate)

    async def _pause(self, moment: Moment) -> Effect:
        async with SessionServerClient(self.seams.server.address) as server:
            report = await server.gate().pause(deadline_s=_GATE_S)

        async def stand_still() -> None:
            engine = EngineInProcess(self.seams.engine)
            async with paused_rollout([self.seams.server.address], [engine], _BUDGET):
                await moment.last()

        did = f"{count_words(report.turns_in_flight, 'turn')} in flight, for {moment.fault.seconds:g} s"
        return Effect(did, stand_still, self._open_gate)

    async def _open_gate(self) -> None:
        async with SessionServerClient(self.seams.server.address) as server:
            await server.gate().resume(deadline_s=_GATE_S)

    async def _end_rollout(self, moment: Moment) -> Effect:
        pending = list(self.running)
        self.may_begin.clear()

        async def end() -> None:
            budget = replace(_BUDGET, agents_s=moment.fault.seconds or _AGENTS_S)
            engine = EngineInProcess(self.seams.engine)
            hooks = self.manager.abort_hooks()
            report = await abort_rollout(
                pending,
                session_servers=[self.seams.server.address],
                engine_workers=[engine],
                agent_hooks=[hooks],
                budget=budget,
            )
            if report.problems:
                raise HarnessError("; ".join(report.problems))

        async def go_on() -> None:
            self.may_begin.set()

        return Effect(f"{count_words(len(pending), 'rollout')} ended", end, go_on)

    async def _kill_server(self, moment: Moment) -> Effect:
        if not self.seams.server.is_up:
            raise HarnessError("the server was already killed, and not back yet")
        did = f"the server was killed with {count_words(len(self.seams.server.open_sessions), 'session')}"
        await self.seams.server.kill()
        return Effect(did, moment.last, self.seams.server.start)

    async def _kill_engine(self, moment: Moment) -> Effect:
        if not self.seams.engine_is_up:
            raise HarnessError("the engine was already killed, and not back yet")
        did = f"the engine was killed with {count_words(len(self.seams.engine.live), 'request')}"
        await self.seams.kill_engine()
        if moment.fault.seconds is None:
            return Effect(did)
        return Effect(did, moment.last, self.seams.start_engine)

    # On one session, or on each of those that the fault names

    async def _abort_engine(self, moment: Moment) -> Effect:
        targets = self._targets(moment)
        calls = [each for each in self.seams.engine.live.values() if each.session_id in targets]
        for each in calls:
            await self.seams.engine.abort_early(each)
        return Effect(f"{count_words(len(calls), 'request')} ended")

    async def _kill_agent(self, moment: Moment) -> Effect:
        killed = self._signal(self._targets(moment), signal.SIGKILL)
        return Effect(f"{count_words(len(killed), 'agent')} killed")

    async def _stop_agent(self, moment: Moment) -> Effect:
        stopped = self._signal(self._targets(moment), signal.SIGSTOP)
        did = f"{count_words(len(stopped), 'agent')} stopped"
        if moment.fault.seconds is None:
            return Effect(did)

        async def go_on() -> None:
            gone = len(stopped) - len(self._signal(stopped, signal.SIGCONT))
            if gone:
                raise HarnessError(f"{did}, {gone} of them ended before the SIGCONT")

        return Effect(did, moment.last, go_on)

    async def _duplicate_request(self, moment: Moment) -> Effect:
        repeated = sum(map(self.seams.agents.repeat, self._targets(moment)))
        return Effect(f"{count_words(repeated, 'request')} arrived again")

    async def _arm(self, moment: Moment) -> Effect:
        fault = NetworkFault(moment.fault.action, moment.fault.seconds)
        if moment.call is not None:
            moment.call.faults.append(fault)
            return Effect("1 request")
        sessions = self._targets(moment).values()
        for session in sessions:
            self.armed.setdefault(session, []).append(fault)
        return Effect(f"the next request of {count_words(len(sessions), 'session')}")

    def _signal(self, session_ids: Iterable[str], number: signal.Signals) -> list[str]:
        return [session_id for session_id in session_ids if self.manager.signal_agent(session_id, number)]

    def _targets(self, moment: Moment) -> dict[str, int]:
        """Return the triggering session or, for the clock, all open sessions that the fault names."""
        if moment.call is not None and moment.session is not None:
            return {moment.call.session_id: moment.session}
        present = self.roster.present().items()
        return {session_id: session for session_id, session in present if moment.fault.names(session)}

"""What each action does: a blow at once and, for some, an aftermath and an undoing.

Whoever triggered a fault waits for its blow, so that a turn does not outrun what shall befall it. The aftermath (a gate
that stays shut, an engine that is gone, the rest of an abort) takes its time beside the sessions; what must not stay is
undone after it, also when it is cut short.

An undoing acts on what the blow hit, not on who is there by then: a server that is gone in between takes nobody off the
list. A blow that finds nothing left to hit, and an undoing that no longer reaches what was hit, raise: the run reports
both as problems of the fault.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from harness.client.gate import GateClient
from harness.control.abort import abort_rollout
from harness.control.abort_report import AbortBudget
from harness.control.engines import EngineInProcess
from harness.control.pause import paused_rollout
from harness.errors import HarnessError
from harness.rollouts.manager import SessionManager
from harness.samples.rollout import Rollout
from harness.suite.faults.company import Company
from harness.suite.faults.engine_seam import EngineCall, NetworkFault
from harness.suite.faults.seams import Seams
from harness.suite.faults.spec import ON_THE_NETWORK, Action, Fault

_GATE_S = 10.0
_AGENTS_S = 2.0
"""What agents get to end by themselves when a rollout is ended."""
_UNDO_S = 30.0

Later = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Blow:
    """What an action did at once, and what it has still to do."""

    did: str
    aftermath: Later | None = None
    undo: Later | None = None
    """What must not stay, however the aftermath ends."""

    async def follow(self) -> None:
        """The aftermath and the undoing."""
        try:
            if self.aftermath is not None:
                await self.aftermath()
        finally:
            if self.undo is not None:
                async with asyncio.timeout(_UNDO_S):
                    await self.undo()


class Moment(NamedTuple):
    """A fault and what triggered it."""

    fault: Fault
    session: int | None
    """Whose turn; None when it was the clock."""
    call: EngineCall | None
    """Its request."""

    async def passes(self) -> None:
        """As long as the fault lasts."""
        await asyncio.sleep(self.fault.seconds or 0)


class Rollouts:
    """The rollouts that run, for whoever ends them all; nothing begins while that goes on."""

    def __init__(self) -> None:
        self.running: dict[asyncio.Task[Rollout], int] = {}
        """Each with the position of its session."""
        self.may_begin = asyncio.Event()
        self.may_begin.set()


class Actions:
    """The actions on one scenario."""

    def __init__(self, seams: Seams, manager: SessionManager, company: Company, rollouts: Rollouts) -> None:
        self._seams = seams
        self._manager = manager
        self._company = company
        self._rollouts = rollouts
        self._armed: dict[int, list[NetworkFault]] = {}
        self._table: Mapping[Action, Callable[[Moment], Awaitable[Blow]]] = {
            "abort_engine": self._abort_engine,
            "drain": self._drain,
            "pause": self._pause,
            "kill_agent": self._kill_agent,
            "stop_agent": self._stop_agent,
            "kill_engine": self._kill_engine,
            "kill_server": self._kill_server,
            "duplicate_request": self._duplicate_request,
            "end_rollout": self._end_rollout,
            **dict.fromkeys(ON_THE_NETWORK, self._hurt),
        }

    async def strike(self, moment: Moment) -> Blow:
        """Do what the fault does at once. Raises `HarnessError` when it cannot be done."""
        return await self._table[moment.fault.action](moment)

    def armed(self, session: int) -> Sequence[NetworkFault]:
        """What waits for the next request of `session`, once."""
        return self._armed.pop(session, ())

    # On everything

    async def _drain(self, moment: Moment) -> Blow:
        async with GateClient(self._seams.server.address) as gate:
            report = await gate.drain(deadline_s=_GATE_S)
        closed, in_flight = _counted(report.sessions_closed, "session"), _counted(report.turns_in_flight, "turn")
        return Blow(f"{closed} closed, {in_flight} in flight", moment.passes, self._open_gate)

    async def _pause(self, moment: Moment) -> Blow:
        async with GateClient(self._seams.server.address) as gate:
            report = await gate.pause(deadline_s=_GATE_S)

        async def stand_still() -> None:
            async with paused_rollout([self._seams.server.address], [EngineInProcess(self._seams.engine)]):
                await moment.passes()

        did = f"{_counted(report.turns_in_flight, 'turn')} in flight, for {moment.fault.seconds:g} s"
        return Blow(did, stand_still, self._open_gate)

    async def _open_gate(self) -> None:
        async with GateClient(self._seams.server.address) as gate:
            await gate.resume(deadline_s=_GATE_S)

    async def _end_rollout(self, moment: Moment) -> Blow:
        pending = list(self._rollouts.running)
        self._rollouts.may_begin.clear()

        async def end() -> None:
            budget = AbortBudget(agents_s=moment.fault.seconds or _AGENTS_S)
            engine = EngineInProcess(self._seams.engine)
            hooks = self._manager.abort_hooks()
            report = await abort_rollout(pending, [self._seams.server.address], [engine], [hooks], budget)
            if report.problems:
                raise HarnessError("; ".join(report.problems))

        async def go_on() -> None:
            self._rollouts.may_begin.set()

        return Blow(f"{_counted(len(pending), 'rollout')} ended", end, go_on)

    async def _kill_server(self, moment: Moment) -> Blow:
        if not self._seams.server.is_up:
            raise HarnessError("the server had been killed before, and was not back yet")
        sessions = len(self._seams.server.open_sessions)
        await self._seams.server.kill()
        return Blow(
            f"the server was killed with {_counted(sessions, 'session')}", moment.passes, self._seams.server.start
        )

    async def _kill_engine(self, moment: Moment) -> Blow:
        if not self._seams.engine_is_up:
            raise HarnessError("the engine had been killed before, and was not back yet")
        did = f"the engine was killed with {_counted(len(self._seams.engine.live), 'request')}"
        await self._seams.kill_engine()
        if moment.fault.seconds is None:
            return Blow(did)
        return Blow(did, moment.passes, self._seams.start_engine)

    # On one session, or on each of those that the fault names

    async def _abort_engine(self, moment: Moment) -> Blow:
        targets = self._targets(moment)
        calls = [each for each in self._seams.engine.live.values() if each.session_id in targets]
        for each in calls:
            await self._seams.engine.abort_early(each)
        return Blow(f"{_counted(len(calls), 'request')} ended")

    async def _kill_agent(self, moment: Moment) -> Blow:
        killed = self._signal(self._targets(moment), signal.SIGKILL)
        return Blow(f"{_counted(len(killed), 'agent')} killed")

    async def _stop_agent(self, moment: Moment) -> Blow:
        stopped = self._signal(self._targets(moment), signal.SIGSTOP)
        did = f"{_counted(len(stopped), 'agent')} stopped"
        if moment.fault.seconds is None:
            return Blow(did)

        async def go_on() -> None:
            gone = len(stopped) - len(self._signal(stopped, signal.SIGCONT))
            if gone:
                raise HarnessError(f"{did}, {gone} of them ended before the SIGCONT")

        return Blow(did, moment.passes, go_on)

    async def _duplicate_request(self, moment: Moment) -> Blow:
        repeated = sum(map(self._seams.agents.repeat, self._targets(moment)))
        return Blow(f"{_counted(repeated, 'request')} arrived again")

    async def _hurt(self, moment: Moment) -> Blow:
        hurt = NetworkFault(moment.fault.action, moment.fault.seconds)
        if moment.call is not None:
            moment.call.faults.append(hurt)
            return Blow("1 request")
        sessions = self._targets(moment).values()
        for session in sessions:
            self._armed.setdefault(session, []).append(hurt)
        return Blow(f"the next request of {_counted(len(sessions), 'session')}")

    def _signal(self, session_ids: Iterable[str], number: signal.Signals) -> list[str]:
        """The sessions whose agents the signal reached."""
        return [session_id for session_id in session_ids if self._manager.signal_agent(session_id, number)]

    def _targets(self, moment: Moment) -> dict[str, int]:
        """Who triggered the fault or, when it was the clock, everybody that it names; ids and positions."""
        if moment.call is not None and moment.session is not None:
            return {moment.call.session_id: moment.session}
        present = self._company.present().items()
        return {session_id: session for session_id, session in present if moment.fault.names(session)}


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

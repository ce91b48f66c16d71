"""Plays the faults of one scenario: tells the timeline what happens, and has done what is due.

When the scenario ends the stage cuts every aftermath short and leaves the gate open, the server up and the engine as
the faults left it; every time that a fault came is then a line of the log.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec

from harness.errors import HarnessError
from harness.rollouts.agents.task import AgentTask
from harness.rollouts.manager import SessionManager
from harness.samples.rollout import Rollout
from harness.sessions.ledger import Ledger, total
from harness.suite.faults.actions import Actions, Moment, Rollouts
from harness.suite.faults.company import Company
from harness.suite.faults.engine_seam import EngineCall
from harness.suite.faults.firing import FaultLog, Firing, Witness
from harness.suite.faults.seams import Seams
from harness.suite.faults.spec import Fault
from harness.suite.faults.timeline import Due, Event, Timeline, TimePassed, TokensSampled, TurnBegan


class FaultStage:
    """The faults of one scenario while it runs; the `Watcher` of its engine requests."""

    def __init__(
        self,
        faults: Sequence[Fault],
        company: Company,
        seams: Seams,
        manager: SessionManager,
        log: FaultLog,
    ) -> None:
        self._faults = faults
        self._company = company
        self._seams = seams
        self._manager = manager
        self._log = log
        self._rollouts = Rollouts()
        self._actions = Actions(seams, manager, company, self._rollouts)
        self._timeline = Timeline(faults, company.seeds)
        self._began = time.monotonic()
        self._firings: list[Firing] = []
        self._ended: dict[int, Rollout] = {}
        self._met: set[int] = set()
        self._playing: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def playing(self) -> AsyncIterator[None]:
        """Faults come inside the block; nothing of them is left behind it but their lines in the log."""
        self._began = time.monotonic()
        before = self._log.read()
        self._seams.engine.watcher = self
        clock = asyncio.create_task(self._watch_clock(), name="fault timeline")
        try:
            yield
        finally:
            self._seams.engine.watcher = None
            clock.cancel()
            await asyncio.gather(clock, return_exceptions=True)
            try:
                await self._cut_short()
            finally:
                self._log.replace([*before, *(self._completed(firing) for firing in self._firings)])

    # What rollouts tell

    async def run(self, task: AgentTask, number: int) -> Rollout | None:
        """The rollout of `task`, in reach of an end of the whole; None when that had to cancel it."""
        await self._rollouts.may_begin.wait()
        session = self._company.position_of(number)
        running = asyncio.create_task(self._manager.run(task), name=f"rollout {number}")
        self._rollouts.running[running] = session
        try:
            await asyncio.wait([running])
        finally:
            del self._rollouts.running[running]
            if running.cancel():
                await asyncio.wait([running])
        if running.cancelled():
            return None
        self._ended[session] = running.result()
        return running.result()

    def has_met(self, number: int) -> bool:
        """Whether a fault came while the rollout ran."""
        return self._company.position_of(number) in self._met

    # What requests tell

    async def began(self, call: EngineCall) -> None:
        """See `Watcher`."""
        session = self._company.position(call.session_id)
        if session is not None:
            call.faults += self._actions.armed(session)
            if call.is_first:
                await self._meet(TurnBegan(session, call.turn), call)

    async def sampled(self, call: EngineCall) -> None:
        """See `Watcher`."""
        session = self._company.position(call.session_id)
        if session is not None:
            await self._meet(TokensSampled(session, call.turn, call.tokens), call)

    def counts_tokens(self, call: EngineCall) -> bool:
        """See `Watcher`."""
        session = self._company.position(call.session_id)
        return session is not None and self._timeline.counts_tokens(session, call.turn)

    # What the clock tells

    async def _watch_clock(self) -> None:
        while (moment := self._timeline.next_second()) is not None:
            await asyncio.sleep(self._began + moment - time.monotonic())
            await self._meet(TimePassed(max(moment, time.monotonic() - self._began)), None)

    # What is due

    async def _meet(self, event: Event, call: EngineCall | None) -> None:
        """Have everything strike that `event` makes due, one after the other."""
        for due in self._timeline.after(event):
            self._firings.append(self._firing(due))
            self._log.append(self._firings[-1])
            self._met |= {witness.session for witness in self._firings[-1].sessions}
            struck = asyncio.Event()
            playing = self._play(len(self._firings) - 1, call, struck)
            self._playing.append(asyncio.create_task(playing, name=f"fault {due.position}"))
            await struck.wait()

    async def _play(self, position: int, call: EngineCall | None, struck: asyncio.Event) -> None:
        """One fault: its blow, and what follows from it."""
        firing = self._firings[position]
        try:
            try:
                blow = await self._actions.strike(Moment(self._faults[firing.fault], firing.session, call))
            finally:
                struck.set()
            firing = self._struck(firing, blow.did)
            self._firings[position] = firing
            await blow.follow()
        except (HarnessError, TimeoutError) as error:
            self._firings[position] = msgspec.structs.replace(firing, problem=str(error) or repr(error))

    async def _cut_short(self) -> None:
        """End every aftermath; what must not stay is undone by it. Raises what no fault should raise."""
        for task in self._playing:
            task.cancel()
        ended = await asyncio.gather(*self._playing, return_exceptions=True)
        bugs = [each for each in ended if isinstance(each, Exception)]
        if bugs:
            raise bugs[0]

    # What is reported

    def _firing(self, due: Due) -> Firing:
        fault = self._faults[due.position]
        return Firing(
            scenario=self._company.scenario,
            fault=due.position,
            action=fault.action,
            trigger=fault.trigger,
            at_s=round(time.monotonic() - self._began, 3),
            session=due.session,
            turn=due.turn,
            tokens=due.tokens,
            sessions=tuple(self._witnesses()),
        )

    def _struck(self, firing: Firing, did: str) -> Firing:
        """`firing` after its blow, which also befell whoever came while it was struck, with a session or without."""
        seen = {witness.session for witness in firing.sessions}
        sessions = (*firing.sessions, *(each for each in self._witnesses() if each.session not in seen))
        self._met |= {witness.session for witness in sessions}
        if self._faults[firing.fault].is_on_everything:
            self._met |= set(self._rollouts.running.values())
        return msgspec.structs.replace(firing, did=did, sessions=sessions)

    def _witnesses(self) -> list[Witness]:
        in_flight = {call.session_id for call in self._seams.engine.live.values()}
        there = sorted(self._company.present().items(), key=lambda item: item[1])
        return [
            Witness(session=session, turn=self._seams.engine.turns_begun(each), in_flight=each in in_flight)
            for each, session in there
        ]

    def _completed(self, firing: Firing) -> Firing:
        """`firing` with how its sessions ended."""
        witnesses = tuple(self._ended_witness(each, firing) for each in firing.sessions)
        ended = [self._ended[each.session] for each in witnesses if each.session in self._ended]
        ledger = total(msgspec.convert(rollout.session["ledger"], Ledger) for rollout in ended)
        return msgspec.structs.replace(firing, sessions=witnesses, ledger=ledger)

    def _ended_witness(self, witness: Witness, firing: Firing) -> Witness:
        witness = msgspec.structs.replace(witness, told=dict(self._told(witness.session, firing.at_s)))
        rollout = self._ended.get(witness.session)
        if rollout is None:
            return witness
        turns = Counter(turn["status"] for turn in rollout.session["turns"])
        return msgspec.structs.replace(witness, outcome=rollout.outcome.kind.value, turns=dict(turns))

    def _told(self, session: int, since_s: float) -> Counter[str]:
        """What the agent of a session was told after a moment."""
        told = (each for each in self._seams.agents.told if each.at >= self._began + since_s)
        return Counter(each.words for each in told if self._company.position(each.session_id) == session)

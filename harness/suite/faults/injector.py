"""Inject a scenario's faults: report events to the timeline, and apply faults that are due.

Model calls and the clock report events. Their source waits for the fault's immediate effect, so a turn never outruns
the fault it triggered; the rest runs in a task beside the sessions. Faults due by one event apply in file order.

The scenario's end cuts the rest short, leaves gate open, server up and engine as it is, and completes the log.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from harness.decoding import convert
from harness.errors import HarnessError
from harness.rollouts.agents.task import AgentTask
from harness.rollouts.manager import SessionManager
from harness.samples.rollout import Rollout
from harness.sessions.ledger import Ledger, total
from harness.suite.faults.actions import Actions, Moment, Roster
from harness.suite.faults.engine_seam import EngineCall
from harness.suite.faults.firing import Bystander, FaultLog, Firing
from harness.suite.faults.seams import Seams
from harness.suite.scenarios.fault import Fault


class Event(NamedTuple):
    """A turn begins or has sampled tokens or, without a session, time passes."""

    session: int | None = None
    turn: int = 0
    tokens: int | None = None
    """Tokens of the turn so far; None when it begins."""
    at_s: float = 0.0
    """Seconds since the scenario began, without a session."""


class Timeline:
    """Maps events to due faults of one scenario, with its sessions' seeds. Pure.

    A session is its position; turns count from 1. A fault on one session is due once per session, one on everything
    once. By `_key`, retries, later requests of a turn and repeated looks at the clock make nothing due again, so
    callers may repeat events. Draws depend only on session seed, fault position and turn, so resumed runs repeat them
    (I10).
    """

    def __init__(self, faults: Sequence[Fault], seeds: Mapping[int, int]) -> None:
        self._faults = faults
        self._seeds = seeds
        self._past: set[tuple[int | None, ...]] = set()

    def after(self, event: Event) -> list[int]:
        """Return the positions of the faults that `event` makes due, in file order."""
        due = [each for each in range(len(self._faults)) if self._is_due(each, event)]
        self._past |= {self._key(each, event) for each in due}
        return due

    def next_second(self) -> float | None:
        """Return the next timed fault's second, if any."""
        timed = ((n, fault.at_second) for n, fault in enumerate(self._faults) if fault.at_second is not None)
        return min((at_s for position, at_s in timed if (position, None) not in self._past), default=None)

    def counts_tokens(self, session: int, turn: int) -> bool:
        """Return True if a fault waits for the turn's tokens."""
        return any(
            fault.at_token is not None and fault.at_turn == turn and fault.names(session) for fault in self._faults
        )

    def _is_due(self, position: int, event: Event) -> bool:
        fault = self._faults[position]
        if self._key(position, event) in self._past:
            return False
        if event.session is None:
            return fault.at_second is not None and fault.at_second <= event.at_s
        if not fault.names(event.session) or (fault.at_token is None) is not (event.tokens is None):
            return False
        if fault.probability is not None:
            seeded = f"{self._seeds[event.session]}:{position}:{event.turn}".encode()
            return int.from_bytes(blake2b(seeded, digest_size=8).digest()) / 2**64 < fault.probability
        return fault.at_turn == event.turn and (fault.at_token or 0) <= (event.tokens or 0)

    def _key(self, position: int, event: Event) -> tuple[int | None, ...]:
        """Return the key under which the fault happens once. A probability is drawn for every turn."""
        fault = self._faults[position]
        if fault.probability is not None:
            return position, event.session, event.turn
        return position, None if fault.is_on_everything else event.session


@dataclass(eq=False)
class FaultInjector:
    """Faults of a running scenario; the `Watcher` of its requests."""

    faults: Sequence[Fault]
    roster: Roster
    seams: Seams
    manager: SessionManager
    log: FaultLog

    def __post_init__(self) -> None:
        self._actions = Actions(self.seams, self.manager, self.roster)
        self._timeline = Timeline(self.faults, self.roster.seeds)
        self._began = time.monotonic()
        self._firings: list[Firing] = []
        self._ended: dict[int, Rollout] = {}
        self._met: set[int] = set()
        self._applying: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def active(self) -> AsyncIterator[None]:
        """Inject faults during the block, then complete the log."""
        self._began = time.monotonic()
        before = self.log.read()
        self.seams.engine.watcher = self

        async def watch_clock() -> None:
            while (moment := self._timeline.next_second()) is not None:
                await asyncio.sleep(self._began + moment - time.monotonic())
                await self._fire(Event(at_s=max(moment, time.monotonic() - self._began)), None)

        clock = asyncio.create_task(watch_clock(), name="fault timeline")
        try:
            yield
        finally:
            self.seams.engine.watcher = None
            clock.cancel()
            await asyncio.gather(clock, return_exceptions=True)
            for task in self._applying:
                task.cancel()  # the undo still runs
            try:
                ended = await asyncio.gather(*self._applying, return_exceptions=True)
            finally:
                # Even if cancelled while undos run.
                self.log.replace([*before, *map(self._complete, self._firings)])
            bugs = [each for each in ended if isinstance(each, Exception)]
            if bugs:  # `_apply` records the errors that a fault may raise
                raise bugs[0]

    # Rollouts

    async def run(self, task: AgentTask, number: int) -> Rollout | None:
        """Run `task` within reach of `end_rollout`. Returns None if that cancelled it."""
        await self._actions.may_begin.wait()
        session = self.roster.position_of(number)
        running = asyncio.create_task(self.manager.run(task), name=f"rollout {number}")
        self._actions.running[running] = session
        try:
            await asyncio.wait([running])
        finally:
            del self._actions.running[running]
            # True only if this call was cancelled: the rollout must not outlive it.
            if running.cancel():
                await asyncio.wait([running])
        if running.cancelled():
            return None
        self._ended[session] = running.result()
        return running.result()

    def has_met(self, number: int) -> bool:
        """Return True if a fault fired during the rollout."""
        return self.roster.position_of(number) in self._met

    # Events

    async def on_request(self, call: EngineCall) -> None:
        session = self.roster.position(call.session_id)
        if session is not None:
            call.faults += self._actions.armed.pop(session, ())
            if call.is_first:
                await self._fire(Event(session, call.turn), call)

    async def on_tokens(self, call: EngineCall) -> None:
        session = self.roster.position(call.session_id)
        if session is not None:
            await self._fire(Event(session, call.turn, call.tokens), call)

    def counts_tokens(self, call: EngineCall) -> bool:
        session = self.roster.position(call.session_id)
        return session is not None and self._timeline.counts_tokens(session, call.turn)

    # Faults that are due

    async def _fire(self, event: Event, call: EngineCall | None) -> None:
        for position in self._timeline.after(event):
            fault = self.faults[position]
            firing = Firing(
                scenario=self.roster.scenario,
                fault=position,
                action=fault.action,
                trigger=fault.trigger,
                at_s=round(time.monotonic() - self._began, 3),
                at=time.time(),
                session=event.session,
                turn=event.turn,
                tokens=event.tokens or 0,
                sessions=tuple(self._bystanders()),
            )
            self._firings.append(firing)
            self.log.append(firing)
            self._met |= {bystander.session for bystander in firing.sessions}
            has_applied = asyncio.Event()
            applying = self._apply(len(self._firings) - 1, call, has_applied)
            self._applying.append(asyncio.create_task(applying, name=f"fault {position}"))
            await has_applied.wait()

    async def _apply(self, position: int, call: EngineCall | None, has_applied: asyncio.Event) -> None:
        firing = self._firings[position]
        fault = self.faults[firing.fault]
        try:
            try:
                effect = await self._actions.apply(Moment(fault, firing.session, call))
            finally:
                # Even if the action fails: the triggering turn waits for this.
                has_applied.set()
            # Sessions that appeared during the effect met the fault too. A fault on everything also met rollouts
            # that have no session yet.
            seen = {bystander.session for bystander in firing.sessions}
            sessions = (*firing.sessions, *(each for each in self._bystanders() if each.session not in seen))
            self._met |= {bystander.session for bystander in sessions}
            if fault.is_on_everything:
                self._met |= set(self._actions.running.values())
            firing = msgspec.structs.replace(firing, did=effect.did, sessions=sessions)
            self._firings[position] = firing
            await effect.finish()
        except (HarnessError, TimeoutError) as error:
            self._firings[position] = msgspec.structs.replace(firing, problem=str(error) or repr(error))

    # Reports

    def _bystanders(self) -> list[Bystander]:
        in_flight = {call.session_id for call in self.seams.engine.live.values()}
        there = sorted(self.roster.present().items(), key=lambda item: item[1])
        return [
            Bystander(session=session, turn=self.seams.engine.turns_begun(each), in_flight=each in in_flight)
            for each, session in there
        ]

    def _complete(self, firing: Firing) -> Firing:
        later = [each for each in self.seams.agents.error_answers if each.at >= self._began + firing.at_s]
        rollouts: list[Rollout] = []
        completed: list[Bystander] = []
        for bystander in firing.sessions:
            told = Counter(each.words for each in later if self.roster.position(each.session_id) == bystander.session)
            completed.append(msgspec.structs.replace(bystander, told=dict(told)))
            rollout = self._ended.get(bystander.session)
            if rollout is not None:
                rollouts.append(rollout)
                turns = Counter(turn["status"] for turn in rollout.session["turns"])
                outcome = rollout.outcome.kind.value
                completed[-1] = msgspec.structs.replace(completed[-1], outcome=outcome, turns=dict(turns))
        return msgspec.structs.replace(
            firing,
            sessions=tuple(completed),
            ledger=total(convert(rollout.session["ledger"], Ledger) for rollout in rollouts),
        )

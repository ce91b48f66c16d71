"""Sessions that are opened, taken over, drained and closed at once, on a disk that is slow and may fail.

Hypothesis decides what is asked next, and when the disk keeps or loses the next write. Whatever the order: no answer is
lost or in two sessions, in memory or on the disk; no session slips through a drain; what was promised is kept.
"""

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from contextlib import closing
from functools import partial
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from harness.errors import HarnessError, StoreError
from harness.server.admitted import AdmittedTurns
from harness.server.registry import SessionRegistry
from harness.server.store.base import MemoryStore
from harness.server.telemetry.metrics import ServerMetrics
from harness.sessions.lifecycle import Phase
from harness.sessions.session import Session
from harness.sessions.session_config import SessionConfig
from harness.types import Turn
from tests.builders import take_turn, user
from tests.thoroughness import examples

ROUNDS = 8  # of the event loop, until every task waits for the disk


class SlowDisk(MemoryStore):
    """Writes wait, in their order, until somebody says what becomes of them."""

    def __init__(self) -> None:
        self.phases: dict[str, Phase] = {}
        self.turns: dict[str, dict[int, Turn]] = {}
        self._waiting: deque[tuple[Callable[[], object], asyncio.Future[None]]] = deque()

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting)

    async def create(self, session: Session) -> None:
        await self._write(partial(self._begin, session.session_id))

    async def take_over(self, session: Session, previous: Session) -> None:
        turns = {turn.index: turn for turn in session.turns}
        await self._write(partial(self._exchange, session.session_id, previous.session_id, turns))

    async def set_phase(self, session: Session) -> None:
        await self._write(partial(self._change_phase, session.session_id, session.phase))

    def settle(self, *, is_kept: bool) -> None:
        """Keep or lose the oldest write."""
        write, done = self._waiting.popleft()
        if is_kept:
            write()
            done.set_result(None)
        else:
            done.set_exception(StoreError("disk trouble"))

    def _begin(self, session_id: str) -> None:
        self.phases[session_id] = Phase.OPEN
        self.turns[session_id] = {}

    def _exchange(self, session_id: str, previous_id: str, turns: dict[int, Turn]) -> None:
        self.phases |= {session_id: Phase.OPEN, previous_id: Phase.CLOSED}
        self.turns[session_id] = turns

    def _change_phase(self, session_id: str, phase: Phase) -> None:
        if session_id in self.phases:
            self.phases[session_id] = phase

    async def _write(self, write: Callable[[], object]) -> None:
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((write, done))
        await done


class RegistryMachine(RuleBasedStateMachine):
    """One registry, its owners, and their answers."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.disk = SlowDisk()
        self.metrics = ServerMetrics()
        self.registry = SessionRegistry(
            self.disk, self.metrics, AdmittedTurns(self.disk, self.metrics), drain_grace_s=20.0
        )
        self.tasks: set[asyncio.Task[Any]] = set()
        self.owned: list[Session] = []
        """Sessions that somebody was given and has not asked to close."""
        self.known: list[str] = []
        """Ids of sessions that somebody was given."""
        self.answers: dict[str, Session] = {}
        """By their text, with the session whose owner waits for them."""
        self.numbers = itertools.count()
        self.drains = 0

    def teardown(self) -> None:
        with closing(self.runner):
            self.settle_everything(is_kept=True)

    @initialize(is_drained=st.booleans())
    def two_conversations(self, is_drained: bool) -> None:
        """What a server may find itself with."""
        for _ in range(2):
            self.open()
        self.settle_everything(is_kept=True)
        for session in self.owned:
            self.answer_in(session)
        if is_drained:
            self.drain()
            self.settle_everything(is_kept=True)

    @rule()
    def open(self) -> None:
        """Somebody wants a session."""
        self.begin(self.opened(SessionConfig()))

    @rule(number=st.integers(0, 9))
    def take_over(self, number: int) -> None:
        """Somebody wants to continue with an earlier session, which may be another's by now, or nobody's."""
        self.begin(self.opened(SessionConfig(resumes=self.known[number % len(self.known)])))

    @rule()
    def drain(self) -> None:
        """Every session there is accepts no further turn, at once."""
        self.drains += 1
        self.begin(self.drained(list(self.registry)))

        assert not any(session.is_open for session in self.registry)

    @precondition(lambda self: self.owned)
    @rule(number=st.integers(0, 9))
    def close(self, number: int) -> None:
        """An owner has what it wanted."""
        session = self.owned[number % len(self.owned)]
        if self.registry.in_memory(session.session_id) is not None:
            self.owned.remove(session)
            self.answers = {text: owner for text, owner in self.answers.items() if owner is not session}
            self.begin(self.closed(session))

    @precondition(lambda self: any(session.is_open for session in self.owned))
    @rule()
    def answer(self) -> None:
        """An open session gets an answer, which is durable by then."""
        self.answer_in(next(session for session in self.owned if session.is_open))

    @precondition(lambda self: self.disk.is_busy)
    @rule(is_kept=st.booleans())
    def settle(self, is_kept: bool) -> None:
        """The disk is done with its oldest write."""
        self.disk.settle(is_kept=is_kept)
        self.run_tasks()

    @rule(is_kept=st.booleans())
    def settle_everything(self, is_kept: bool) -> None:
        """The disk works, or fails, until nobody waits for it."""
        while self.disk.is_busy:
            self.settle(is_kept)

        assert not self.tasks

    @invariant()
    def the_metric_counts_what_is_held(self) -> None:
        """At any moment."""
        assert f"harness_sessions_open {len(self.registry)}.0\n" in self.metrics.render().decode()

    @invariant()
    def every_answer_is_held_once(self) -> None:
        """At any moment: an answer moves from one session to another at once, or not at all."""
        held = Counter(text for session in self.registry for text in texts_of(session.turns))

        assert {text: held[text] for text in self.answers} == dict.fromkeys(self.answers, 1)

    @invariant()
    def a_kill_loses_and_doubles_no_answer(self) -> None:
        """Whatever is under way: what the next server reads has every answer once."""
        unclosed = [turns for key, turns in self.disk.turns.items() if self.disk.phases[key] is not Phase.CLOSED]
        kept = Counter(text for turns in unclosed for text in texts_of(turns.values()))

        assert {text: kept[text] for text in self.answers} == dict.fromkeys(self.answers, 1)

    @invariant()
    def what_is_held_is_somebodys(self) -> None:
        """When nothing is under way; a session that is closed may wait there for the disk to learn of it."""
        held = {session for session in self.registry if session.phase is not Phase.CLOSED}

        assert self.tasks or held == set(self.owned)

    def answer_in(self, session: Session) -> None:
        text = f"answer {next(self.numbers)}"
        turn = take_turn(session, [user(text)], text)
        self.disk.turns[session.session_id][turn.index] = turn
        self.answers[text] = session

    async def opened(self, config: SessionConfig) -> None:
        drains = self.drains
        try:
            session = await self.registry.open(config)
        except HarnessError:
            return
        assert session.is_open == (drains == self.drains)
        for previous in [each for each in self.owned if each.session_id == config.resumes]:
            assert previous.phase is Phase.CLOSED
            self.owned.remove(previous)
            self.answers |= {text: session for text, owner in self.answers.items() if owner is previous}
        self.owned.append(session)
        self.known.append(session.session_id)

    async def drained(self, sessions: list[Session]) -> None:
        try:
            await self.registry.drain()
        except StoreError:
            return
        for session in sessions:
            assert self.disk.phases.get(session.session_id) is not Phase.OPEN

    async def closed(self, session: Session) -> None:
        try:
            await self.registry.close(session)
        except StoreError:
            assert self.registry.in_memory(session.session_id) is session
            return
        assert self.registry.in_memory(session.session_id) is None
        assert self.disk.phases[session.session_id] is Phase.CLOSED

    def begin(self, call: Coroutine[Any, Any, None]) -> None:
        self.tasks.add(self.runner.get_loop().create_task(call))
        self.run_tasks()

    def run_tasks(self) -> None:
        """Let every task continue until it waits for the disk, and fail with those that failed."""
        self.runner.get_loop().run_until_complete(rounds())
        for task in [task for task in self.tasks if task.done()]:
            self.tasks.remove(task)
            task.result()


async def rounds() -> None:
    """Let the tasks of the loop continue."""
    for _ in range(ROUNDS):
        await asyncio.sleep(0)


def texts_of(turns: Any) -> list[str]:
    """What the turns say."""
    return [turn.reply["content"] for turn in turns]


TestRegistry = RegistryMachine.TestCase
TestRegistry.settings = settings(max_examples=examples(30), stateful_step_count=40, deadline=None)

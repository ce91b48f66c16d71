"""Teachers at work: they score recorded turns while the agent's tool runs.

A teacher never delays a turn: it has its own queue. What it has not scored when samples are collected is caught up
within `CATCH_UP_S`, or missing with the reason. `sessions.teaching` decides what to score.
"""

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from harness.engines.base import TokenProvider
from harness.engines.teachers import TeachAfter, TeacherSpec
from harness.errors import (
    EngineConnectionLost,
    EngineError,
    EngineRejected,
    EngineUnavailable,
    HarnessError,
    OverLimit,
    StoreError,
)
from harness.machine.deadlines import within
from harness.machine.log import get_logger
from harness.samples.merge import NOT_ALIGNED
from harness.server.registry import SessionRegistry
from harness.server.telemetry.printable import shorten_secrets
from harness.server.turns import TurnService
from harness.sessions.paging import SessionStub
from harness.sessions.session import Session
from harness.sessions.teaching import (
    TeachingTask,
    count_top_bytes,
    count_untaught,
    next_said,
    next_teaching,
    read_aligned,
    teach,
)
from harness.tokens.chat_tokenizer import ChatTokenizer
from harness.types import PromptLogprobs

CATCH_UP_S = 5.0
"""Longest wait of a collection for teachers."""

TOO_LONG = "too_long"
"""Reason of tokens beyond the teacher's context."""

_AT_ONCE = 16  # requests to one teacher
_SCORE_S = 240.0  # a request that takes longer ends them all, and a teacher may work on one at a time
_ATTEMPTS = 3  # per session: a request that breaks its server must not do so for ever
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0

# A thread of their own: conversations are long, and requests wait for the threads that all share.
_READER = ThreadPoolExecutor(1, "teachers")

log = get_logger(__name__)


class Teachers:
    def __init__(self, turns: TurnService, sessions: SessionRegistry) -> None:
        self._teachers = {spec.name: Teacher(spec, turns, sessions) for spec in turns.settings.teachers}
        self.names = tuple(self._teachers)
        self._sessions = sessions

    def turn_recorded(self, session: Session) -> None:
        """Have the session's new turn scored."""
        for name in session.config.teachers or ():
            teacher = self._teachers.get(name)
            if teacher is not None and teacher.spec.after is TeachAfter.TURN:
                teacher.ask_for(session.session_id)

    async def catch_up(self, session: Session) -> None:
        """Wait for teachers that answer, for `CATCH_UP_S`."""
        teachers = [self._teachers[name] for name in session.config.teachers or () if name in self._teachers]
        await within(CATCH_UP_S, asyncio.gather(*(teacher.finish(session) for teacher in teachers)))

    async def work_for_ever(self) -> None:
        for held in self._sessions:
            if not isinstance(held, SessionStub):  # others when they are collected
                self.turn_recorded(held)
        async with asyncio.TaskGroup() as tasks:
            for teacher in self._teachers.values():
                tasks.create_task(teacher.work_for_ever(), name=f"teacher {teacher.spec.name}")


class Teacher:
    """One teacher, with its queue of sessions."""

    def __init__(self, spec: TeacherSpec, turns: TurnService, sessions: SessionRegistry) -> None:
        self.spec = spec
        self._chat = turns.chat_tokenizer
        self._sessions = sessions
        self._store = turns.store
        self._most_bytes = turns.settings.limits.session_row_bytes
        self._metrics = turns.metrics
        self._queue: asyncio.Queue[str] = asyncio.Queue()
        self._done: dict[str, asyncio.Event] = {}  # by session that is queued or at work
        self._again: set[str] = set()  # asked for while at work
        self._family: ChatTokenizer | None = None  # None if the teacher reads the sessions' ids
        self._broken: Counter[str] = Counter()
        self._has_scored = False  # since the engine was opened
        self._metrics.teacher_queue.labels(spec.name).set_function(self._done.__len__)
        self._problem = ""  # code of the last failure to answer; empty while it answers or starts

    def ask_for(self, session_id: str) -> asyncio.Event:
        """Queue a session. Return what is set when it is scored, or cannot be now."""
        if session_id in self._done:
            self._again.add(session_id)
        else:
            self._done[session_id] = asyncio.Event()
            self._queue.put_nowait(session_id)
        return self._done[session_id]

    async def finish(self, session: Session) -> None:
        """Return when the session is scored, or cannot be now."""
        if count_untaught(session, self.spec.name):
            done = self.ask_for(session.session_id)
            if not self._problem:
                await done.wait()
            if self._problem:
                session.untaught.setdefault(self.spec.name, self._problem)

    async def work_for_ever(self) -> None:
        """Score sessions until cancelled; open the engine again after a failure."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                family = self._family = await asyncio.to_thread(self.spec.open_family, self._chat.tokenizer)
                reads = self._chat.tokenizer if family is None else family.tokenizer
                async with self.spec.open(reads) as engine, asyncio.TaskGroup() as workers:
                    self._problem = ""
                    for _ in range(_AT_ONCE):
                        workers.create_task(self._score_sessions(engine))
            except* Exception as group:  # noqa: BLE001  # a provider may be the user's own, and other teachers continue
                error: BaseException = group
                while isinstance(error, BaseExceptionGroup):
                    error = error.exceptions[0]
                pause_s = _FIRST_PAUSE_S if self._has_scored else pause_s
                self._has_scored = False
                self._problem = self._say("teacher_unavailable", error)
                # Sessions stay queued for the next engine; collections that wait continue without it.
                for session_id, done in self._done.items():
                    self._done[session_id] = asyncio.Event()
                    done.set()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _score_sessions(self, engine: TokenProvider) -> None:
        while True:
            session_id = await self._queue.get()
            try:
                async with self._sessions.borrow(session_id) as session:
                    if session is not None:
                        await self._score_session(engine, session)
            except (EngineUnavailable, EngineConnectionLost, asyncio.CancelledError):  # the next engine continues
                self._queue.put_nowait(session_id)
                raise
            except Exception as error:  # noqa: BLE001  # such as a selection function's: this session gets no scores
                self._say("teaching_failed", error, session_id=shorten_secrets(session_id))
            if session_id in self._again:
                self._again.discard(session_id)
                self._queue.put_nowait(session_id)
            else:
                self._broken.pop(session_id, None)
                self._done.pop(session_id).set()

    async def _score_session(self, engine: TokenProvider, session: Session) -> None:
        name, session_id = self.spec.name, session.session_id
        given_up: set[int] = set()
        session.untaught.pop(name, None)
        while task := await self._next_task(session, engine.capabilities.context_length - 1, given_up):
            given_up.add(task.leaf)
            top_k = self.spec.top_k if self._family is None else 0  # ids of another vocabulary say nothing
            if top_k and session.row_bytes + count_top_bytes(session) >= self._most_bytes:
                session.untaught[name] = OverLimit.code
                continue
            try:
                scoring = await _score(engine, task, session_id, top_k)
                if self._sessions.in_memory(session_id) is not session:
                    return  # taken over or deleted meanwhile
                if changed := teach(session, name, task, scoring, top_k):
                    await self._store.keep_teaching(session_id, name, changed)
                    given_up.discard(task.leaf)
                    scored = sum(int(np.isfinite(turn.teachers[name].logprobs).sum()) for turn in changed)
                    self._metrics.teacher_tokens.labels(name).inc(scored)
                    self._has_scored = True
            except (EngineError, StoreError) as error:
                is_away = isinstance(error, EngineUnavailable | EngineConnectionLost)
                self._broken[session_id] += is_away
                if is_away and self._broken[session_id] < _ATTEMPTS:
                    raise
                session.untaught[name] = self._say("teaching_failed", error, session_id=shorten_secrets(session_id))
        if count_untaught(session, name):
            session.untaught.setdefault(name, TOO_LONG)

    async def _next_task(self, session: Session, longest: int, given_up: set[int]) -> TeachingTask | None:
        name = self.spec.name
        if self._family is None:
            return next_teaching(session, name, longest, given_up)
        while said := next_said(session, name, given_up):
            given_up.add(said.turn.index)
            work = partial(read_aligned, said, self._chat, self._family)
            task = await asyncio.get_running_loop().run_in_executor(_READER, work)
            if task is None:
                session.untaught[name] = NOT_ALIGNED
            elif task.input_ids.size <= longest:
                return task
        return None

    def _say(self, event: str, error: BaseException, **about: str) -> str:
        """Count and log `error`; return its code."""
        code = error.code if isinstance(error, HarnessError) else type(error).__name__
        self._metrics.teacher_failures.labels(self.spec.name, code).inc()
        log.warning(event, teacher=self.spec.name, code=code, error=str(error), **about)
        return code


async def _score(engine: TokenProvider, task: TeachingTask, session_id: str, top_k: int) -> PromptLogprobs:
    if top_k > (most := engine.capabilities.max_top_logprobs):
        raise EngineRejected(f"{engine.capabilities.engine}: expected top_k of at most {most}, got {top_k}")
    more = {"top": top_k} if top_k else {}
    try:
        async with asyncio.timeout(_SCORE_S):
            return await engine.score(task.input_ids, start=task.start, session_id=session_id, **more)
    except TimeoutError:
        raise EngineUnavailable(f"the teacher did not score {task.input_ids.size} ids within {_SCORE_S:g} s") from None

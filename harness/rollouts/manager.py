"""Runs agents against sessions: the part that a rollout manager embeds.

    async with SessionManager("http://127.0.0.1:8000", engines=["sglang=http://10.0.0.1:30000"]) as manager:
        pending = [asyncio.create_task(manager.run(task)) for task in tasks]
        ...
        report = await manager.abort(pending)

A manager that knows the engines behind its server also ends rollouts early, has them stand still, and changes weights
under them. How is decided in `control/`, which does the same for several servers.

One rollout is: create a session, run the agent until it ends or its deadline, end its whole process group, read the
session and its samples, delete the session, classify. However the agent or the server behaves, `run` returns a
`Rollout`; it raises only for programming errors and cancellation. When it is cancelled, the agent is ended and the
session deleted first, in bounded time. Any number of rollouts may run at once; how many is the caller's decision.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Collection, Iterable, MutableSequence, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import TracebackType
from typing import NamedTuple, Self

from harness.client.connections import SessionServerAddress
from harness.client.ended_session import SessionRecord, read_record
from harness.client.session_server import Deadlines, SessionHandle, SessionServerClient
from harness.control.abort import abort_rollout
from harness.control.abort_report import AbortBudget, AbortReport, AgentHooks, Keep, was_cut_short
from harness.control.engines import EngineServer
from harness.control.pause import PauseReport, paused_rollout
from harness.control.weights import WeightUpdate, WeightUpdater
from harness.control.weights_report import UpdateBudget
from harness.engines.base import PauseMode, TokenProvider
from harness.errors import GateClosed, ScenarioError, SessionServerError
from harness.machine.deadlines import to_the_end
from harness.machine.log import get_logger
from harness.rollouts.abort_signal import AbortSignal
from harness.rollouts.agents.agent_runner import AgentRun, AgentRunner
from harness.rollouts.agents.task import AgentTask, FunctionAgent, ProgramAgent
from harness.rollouts.outcome import RolloutFacts, classify, classify_uncreated
from harness.samples.rollout import Outcome, OutcomeKind, Rollout
from harness.sessions.lifecycle import Phase, RolloutEnd
from harness.sessions.record import empty_record
from harness.telemetry.secrets import shorten_secrets
from harness.turn_ends import TurnStatus
from harness.types import Sample

ROLLOUT_ENDED = "rollout_ended"
SESSION_NOT_DELETED = "session_not_deleted"

GRACE_S = 3.0
"""Seconds that an agent gets to obey a SIGTERM or a cancellation."""

_MOST_REASON = 300
"""Characters of an outcome's detail that a session's store keeps."""

_log = get_logger(__name__)


class _LiveRollout(NamedTuple):
    """A rollout that has a session and is not over."""

    task: AgentTask
    signal: AbortSignal


class SessionManager:
    """An async context manager that runs rollouts against one session server.

    Args:
        server_url: The URL of the session server.
        admin_token: Opens its admin verbs; None for a server on loopback that wants none.
        engines: Every engine that generates for it, for `abort`, `paused` and `updating_weights`: `sglang=http://...`,
            `vllm=http://...` (every worker), `router=http://...` for all workers of a `harness router`, which wants the
            admin token when it is this session server, or entered providers.
        grace_s: Seconds that an agent gets to obey a SIGTERM or a cancellation.
        deadlines: How long each step around a session may take.
        client: Speaks to the server in the place of one of the manager's own; its deadlines count, its maker closes it.
    """

    def __init__(
        self,
        server_url: str,
        *,
        admin_token: str | None = None,
        engines: Sequence[TokenProvider | EngineServer | str] = (),
        grace_s: float = GRACE_S,
        deadlines: Deadlines | None = None,
        client: SessionServerClient | None = None,
    ) -> None:
        self._address = SessionServerAddress(server_url, admin_token)
        self._engines = tuple(engines)
        self._client = client or SessionServerClient(self._address, deadlines=deadlines)
        self._closes_client = client is None
        self._grace_s = grace_s
        self.collecting: set[str] = set()
        """Sessions whose agents have ended, and whose rollouts `run` has not returned yet."""
        self._live: dict[str, _LiveRollout] = {}
        self._runner: AgentRunner | None = None
        self._signal: AbortSignal | None = None
        self._aborts: set[object] = set()
        """Of everything, under way now; until the last of them is over nothing begins."""

    async def __aenter__(self) -> Self:
        self._runner = AgentRunner(grace_s=self._grace_s)
        self._signal = AbortSignal()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._runner is not None
        try:
            await self._runner.close()
        finally:
            if self._closes_client:
                await self._client.close()

    async def run(self, task: AgentTask) -> Rollout:
        """Run `task` to its end, whatever that is."""
        assert self._signal is not None, "use `async with SessionManager(...)`"
        signal = self._signal.branch()
        started = time.monotonic()
        try:
            task.require_text()
            session = await self._create(task, signal)
        except ScenarioError as error:
            outcome = Outcome(OutcomeKind.NOT_STARTED, error.cause, error.message)
            return _rollout_without_session(task, outcome, time.monotonic() - started)
        except SessionServerError as error:
            outcome = classify_uncreated(error.code, error.status, error.message)
            return _rollout_without_session(task, outcome, time.monotonic() - started, refusal=error.code)
        self._live[session.session_id] = _LiveRollout(task, signal)
        try:
            return await self._run_on(session, task, signal, started)
        finally:
            del self._live[session.session_id]
            self.collecting.discard(session.session_id)

    async def _run_on(self, session: SessionHandle, task: AgentTask, signal: AbortSignal, started: float) -> Rollout:
        rollout = None
        try:
            run = await self._require_runner().run(task, session, signal)
            self.collecting.add(session.session_id)
            record = await read_record(self._client, session.session_id, end_s=self._client.deadlines.end_s)
            rollout = Rollout(
                session_id=session.session_id,
                outcome=classify(_facts_of(run, record)),
                samples=record.samples,
                session=record.session,
                agent_result=run.result.value,
                seconds=time.monotonic() - started,
            )
        finally:
            if rollout is None or not (signal.keeps_sessions and was_cut_short(rollout)):
                await self._give_back(session.session_id, None if rollout is None else _end_of(task, rollout))
        _log.info(ROLLOUT_ENDED, session_id=shorten_secrets(session.session_id), outcome=rollout.outcome.kind.value)
        return rollout

    @property
    def live(self) -> dict[str, AgentTask]:
        """The sessions of the rollouts that run now, and the task of each; one that waits for its session has none."""
        return {session_id: live.task for session_id, live in self._live.items()}

    async def abort(
        self,
        pending: Iterable[Awaitable[object]],
        *,
        budget: AbortBudget | None = None,
        keep: Keep = Keep.SAMPLES,
        rollout_id: int | None = None,
        continue_engines: bool = False,
        sessions: Collection[str] | None = None,
    ) -> AbortReport:
        """End everything that `pending` waits for and every rollout of this manager; see `abort_rollout`.

        With `sessions` (some of `live`) only the rollouts on these end: others of this manager, and everybody else on
        the server, go on.
        """
        return await abort_rollout(
            pending,
            session_servers=[self._address],
            engine_workers=self._engines,
            agent_hooks=[self.abort_hooks(sessions)],
            budget=budget,
            keep=keep,
            rollout_id=rollout_id,
            continue_engines=continue_engines,
            sessions=sessions,
        )

    def paused(self, budget: AbortBudget | None = None) -> AbstractAsyncContextManager[PauseReport]:
        """For the time of the block no agent gets an answer and no engine is busy; see `paused_rollout`."""
        return paused_rollout([self._address], self._engines, budget)

    def updating_weights(
        self,
        version: int,
        *,
        mode: PauseMode = PauseMode.ABORT,
        budget: UpdateBudget | None = None,
        unconsumed: MutableSequence[Sample] | None = None,
    ) -> AbstractAsyncContextManager[WeightUpdate]:
        """The engines stand still, and the block has them load the weights of `version`; see `WeightUpdater`.

        async with manager.updating_weights(3) as update:
            await update.apply(checkpoint)  # a folder that the engines can read, or a transfer
        report = update.report
        """
        updater = WeightUpdater(self._engines, [self._address], mode=mode, budget=budget, unconsumed=unconsumed)
        return updater.update(version)

    def abort_hooks(self, sessions: Collection[str] | None = None) -> AgentHooks:
        """The callbacks by which `abort_rollout` ends the rollouts of this manager, or those on `sessions`, early.

        Without `sessions`, from its first step on `run` begins nothing: a rollout that has no session yet ends as
        DRAINED. Of several aborts at once the last to be cleared ends that.
        """
        abort = object()

        def announce(keep: Keep) -> None:
            if sessions is None:
                self._aborts.add(abort)
            for signal in self._signals(sessions):
                signal.announce(keep_sessions=keep is Keep.SESSIONS)

        def clear() -> None:
            self._aborts.discard(abort)
            if sessions is None and not self._aborts:
                self._signal = AbortSignal()  # rollouts that begin from now on have nothing to do with this abort

        return AgentHooks(
            f"agents on {self._address.url}",
            announce,
            partial(self._require_runner().ask_to_end, sessions),
            partial(self.stop_agents, sessions=sessions),
            clear,
        )

    async def stop_agents(self, seconds: float, *, sessions: Collection[str] | None = None) -> list[str]:
        """End every agent that runs, or those on `sessions`: SIGTERM, and SIGKILL after half of `seconds`.

        Returns the sessions of agents that are left when `seconds` are over.
        """
        for signal in self._signals(sessions):
            signal.enforce(grace_s=seconds / 2)
        return await self._require_runner().wait_for_all(sessions, timeout_s=seconds)

    def signal_agent(self, session_id: str, number: int) -> bool:
        """Send a signal to the agent program that runs on a session, its whole process group; whether there was one."""
        return self._require_runner().signal(session_id, number)

    async def delete(self, session_id: str) -> None:
        """Give a session back that was kept for a later rollout, and is not wanted any more.

        A failure is logged and nothing more; the session then stays on the server, until somebody deletes it.
        """
        await self._give_back(session_id, None)

    async def _give_back(self, session_id: str, end: RolloutEnd | None) -> None:
        try:
            await self._client.delete(session_id, end)
        except SessionServerError as error:
            _log.warning(SESSION_NOT_DELETED, session_id=shorten_secrets(session_id), error=error.message)

    async def _create(self, task: AgentTask, signal: AbortSignal) -> SessionHandle:
        """A session for `task`; when the rollout is cancelled meanwhile, the session is given back first.

        Raises `SessionServerError` when there is none, or an abort came first.
        """
        aborted = SessionServerError("the rollout was aborted before it began", code=GateClosed.code, was_refused=True)
        if signal.announced.done():
            raise aborted
        cancelled = asyncio.get_running_loop().create_future()
        give_up = (signal.announced, cancelled)
        resumes = {} if task.resumes is None else {"resumes": task.resumes}
        usual = task.agent.session if isinstance(task.agent, ProgramAgent) else {}
        body = {**usual, **task.session, **resumes, "metadata": {**task.session.get("metadata", {}), **task.metadata}}
        creating = asyncio.create_task(self._client.create(body, give_up=give_up))

        async def give_back() -> None:
            # The session may be on its way: the wait for it is that of a deletion.
            await asyncio.wait({creating}, timeout=self._client.deadlines.delete_s)
            creating.cancel()
            if creating.done() and not creating.cancelled() and creating.exception() is None:
                await self.delete(creating.result().session_id)

        try:
            session = await asyncio.shield(creating)
        except asyncio.CancelledError:
            cancelled.set_result(None)
            await to_the_end(give_back())
            raise
        if signal.announced.done():
            await self.delete(session.session_id)
            raise aborted
        return session

    def _signals(self, sessions: Collection[str] | None) -> list[AbortSignal]:
        """Through which the rollouts on `sessions` are ended, or all of this manager."""
        assert self._signal is not None, "use `async with SessionManager(...)`"
        if sessions is None:
            return [self._signal]
        return [live.signal for session_id, live in self._live.items() if session_id in sessions]

    def _require_runner(self) -> AgentRunner:
        assert self._runner is not None, "use `async with SessionManager(...)`"
        return self._runner


def _facts_of(run: AgentRun, record: SessionRecord) -> RolloutFacts:
    turns = record.facts.turns
    failed = turns.get(TurnStatus.FAILED, 0)
    return RolloutFacts(
        end=run.end,
        result=run.result,
        answered=sum(turns.values()) - failed,
        failed=failed,
        refusals=record.facts.refusals,
        is_drained=record.facts.phase == Phase.CLOSING,
        session_lost=record.lost,
    )


def _end_of(task: AgentTask, rollout: Rollout) -> RolloutEnd:
    """The end as the store keeps it; the result of a function may have the reward, that of a program is not trusted."""
    result = (rollout.agent_result or {}) if isinstance(task.agent, FunctionAgent) else {}
    reward = result.get("reward")
    is_number = isinstance(reward, int | float) and not isinstance(reward, bool) and math.isfinite(reward)
    return RolloutEnd(str(rollout.outcome.kind), rollout.outcome.detail[:_MOST_REASON], reward if is_number else None)


def _rollout_without_session(task: AgentTask, outcome: Outcome, seconds: float, *, refusal: str = "") -> Rollout:
    """`refusal` is the code of the error that the server made of it."""
    return Rollout(
        session_id=None,
        outcome=outcome,
        samples=(),
        session={**empty_record(None, None, task.metadata), "refusals": {refusal: 1} if refusal else {}},
        agent_result=None,
        seconds=seconds,
    )

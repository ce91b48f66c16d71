"""Runs agents against sessions. Trainers embed this.

    async with SessionManager("http://127.0.0.1:8000", engines=["sglang=http://10.0.0.1:30000"]) as manager:
        pending = [asyncio.create_task(manager.run(task)) for task in tasks]
        report = await manager.abort(pending)

A rollout creates a session, runs the agent, reads the samples, deletes the session and classifies the outcome. `run`
raises only for programming errors and cancellation. When cancelled, it first ends the agent and deletes the session, in
bounded time. The caller bounds concurrency.
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Collection, Iterable, Mapping, MutableSequence, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

from harness.engines.base import PauseMode, TokenProvider
from harness.errors import GateClosed, ScenarioError, SessionServerError
from harness.machine.deadlines import to_the_end
from harness.machine.log import get_logger
from harness.rollouts.abort_signal import AbortSignal
from harness.rollouts.agents.agent_runner import AgentRunner
from harness.rollouts.agents.task import AgentTask, FunctionAgent
from harness.rollouts.client.connections import SessionServerAddress
from harness.rollouts.client.session_server import Deadlines, SessionHandle, SessionServerClient, read_record
from harness.rollouts.control.abort import abort_rollout
from harness.rollouts.control.abort_report import AbortBudget, AbortReport, AgentHooks, Keep, was_cut_short
from harness.rollouts.control.engines import EngineServer
from harness.rollouts.control.pause import PauseReport, paused_rollout
from harness.rollouts.control.weights import WeightUpdate, WeightUpdater
from harness.rollouts.control.weights_report import UpdateBudget
from harness.rollouts.outcome import RolloutFacts, classify, classify_uncreated, was_lost
from harness.samples.rollout import Outcome, OutcomeKind, Rollout, stated_number
from harness.server.telemetry.printable import shorten_secrets
from harness.sessions.lifecycle import RolloutEnd
from harness.sessions.record import empty_record
from harness.sessions.seeds import seed_of
from harness.sessions.session_config import Edit, Inheritance
from harness.types import Json, Sample

ROLLOUT_ENDED = "rollout_ended"
ROLLOUT_RESUMED = "rollout_resumed"
ROLLOUT_NOT_RESUMED = "rollout_not_resumed"
SESSION_NOT_DELETED = "session_not_deleted"

GRACE_S = 3.0
"""Seconds for an agent to obey a SIGTERM or a cancellation."""

_MOST_REASON = 300

_log = get_logger(__name__)


class _LiveRollout(NamedTuple):
    task: AgentTask
    signal: AbortSignal


class _Life(NamedTuple):
    rollout: Rollout
    was_lost: bool = False


class SessionManager:
    """An async context manager that runs rollouts against one session server.

    Args:
        server_url: URL of the session server.
        admin_token: Token of its admin API; None for a loopback server without one.
        engines: Every engine that generates for it: `sglang=http://...`, `vllm=http://...` (every worker), entered
            providers, or `router=http://...` for all workers of a `harness router`. The last needs the admin token if
            it is this server.
        grace_s: See `GRACE_S`.
        deadlines: Limits of each step around a session.
        client: Client to use, with its deadlines. Its creator closes it.
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
        """Sessions whose agents ended and whose `run` has not returned."""
        self._live: dict[str, _LiveRollout] = {}
        self._runner: AgentRunner | None = None
        self._signal: AbortSignal | None = None
        # Aborts of all rollouts in progress. Nothing begins until the last of them is over.
        self._aborts: set[object] = set()

    async def __aenter__(self) -> Self:
        self._runner = AgentRunner(grace_s=self._grace_s)
        self._signal = AbortSignal()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        try:
            await self._runner.close()
        finally:
            if self._closes_client:
                await self._client.close()

    async def run(self, task: AgentTask) -> Rollout:
        """Run `task` to its end, in up to `1 + resume_attempts` lives. Return the last one."""
        started = time.monotonic()
        life = await self._run_once(task, task)
        for number in range(task.resume_attempts):
            left_s = task.deadline_s - (time.monotonic() - started)
            if not life.was_lost or life.rollout.session_id is None or left_s <= 0:
                break
            _log.info(ROLLOUT_RESUMED, session_id=shorten_secrets(life.rollout.session_id), life=number + 2)
            inherits = Inheritance(life.rollout.session_id, strict=task.inherits is not None and task.inherits.strict)
            try:
                await asyncio.to_thread(set_aside, task.workdir.absolute())
            except OSError as error:  # the last life stands
                _log.warning(ROLLOUT_NOT_RESUMED, detail=f"{task.workdir}: {error}")
                break
            heir = replace(without_session(task), inherits=inherits, deadline_s=left_s)
            again = await self._run_once(heir, task)
            if again.rollout.session_id is None:  # the last life stands
                _log.warning(ROLLOUT_NOT_RESUMED, detail=again.rollout.outcome.detail)
                break
            life = again
        return replace(life.rollout, seconds=time.monotonic() - started)

    async def resume(self, session_id: str, task: AgentTask, *, strict: bool = False) -> Rollout:
        """Run `task` with the record of an ended session: repeated calls get its answers, others are sampled.

        `strict` refuses the first call that differs. The server's store must hold the record.
        """
        return await self.run(replace(without_session(task), inherits=Inheritance(session_id, strict=strict)))

    async def fork(
        self, session_id: str, task: AgentTask, *, turn: int, count: int, edits: Mapping[int, str] | None = None
    ) -> list[Rollout]:
        """Run `task` `count` times at once with the record of an ended session up to `turn`, which is resampled.

        Inherited tokens have mask 0: the forked session trains them. `edits` are other texts of messages that `turn`
        adds, by their index in the conversation. Each fork has its own directory `fork-N` in `workdir`, and
        `forked_from` in its metadata. Raises `ScenarioError` for no fork.
        """
        if count < 1:
            raise ScenarioError(f"count: expected at least 1 fork, got {count}")
        texts = tuple(Edit(message, content) for message, content in (edits or {}).items())
        inherits = Inheritance(session_id, before=turn, trained=False, edits=texts)
        async with asyncio.TaskGroup() as group:
            forks = [
                group.create_task(self.run(_fork_of(replace(without_session(task), inherits=inherits), number)))
                for number in range(count)
            ]
        return [fork.result() for fork in forks]

    async def _run_once(self, task: AgentTask, first: AgentTask) -> "_Life":
        assert self._signal is not None, "use `async with SessionManager(...)`"
        signal = self._signal.branch()
        started = time.monotonic()
        try:
            task.require_valid()
            session = await self._create(task, signal)
        except ScenarioError as error:
            outcome = Outcome(OutcomeKind.NOT_STARTED, error.cause, error.message)
            return _Life(rollout_without_session(task, outcome, time.monotonic() - started))
        except SessionServerError as error:
            outcome = classify_uncreated(error.code, error.status, error.message)
            return _Life(rollout_without_session(task, outcome, time.monotonic() - started, refusal=error.code))
        self._live[session.session_id] = _LiveRollout(first, signal)
        try:
            return await self._run_on(session, task, signal, started)
        finally:
            del self._live[session.session_id]
            self.collecting.discard(session.session_id)

    async def _run_on(self, session: SessionHandle, task: AgentTask, signal: AbortSignal, started: float) -> "_Life":
        rollout = None
        try:
            run = await self._require_runner().run(task, session, signal)
            self.collecting.add(session.session_id)
            record = await read_record(self._client, session.session_id, end_s=self._client.deadlines.end_s)
            rollout = Rollout(
                session_id=session.session_id,
                outcome=classify(RolloutFacts.of(run.end, record, run.result)),
                samples=record.samples,
                session=record.session,
                agent_result=run.result.value,
                seconds=time.monotonic() - started,
            )
        finally:
            # An aborted rollout's session may stay for a later rollout. All others are deleted, even under
            # cancellation.
            if rollout is None or not (signal.keeps_sessions and was_cut_short(rollout)):
                await self._give_back(session.session_id, None if rollout is None else _end_of(task, rollout))
        _log.info(ROLLOUT_ENDED, session_id=shorten_secrets(session.session_id), outcome=rollout.outcome.kind.value)
        return _Life(rollout, not signal.announced.done() and was_lost(run.end, rollout.outcome))

    @property
    def live(self) -> dict[str, AgentTask]:
        """Tasks of the rollouts that have a session, by its id; in a later life, the first life's."""
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
        """End all of `pending` and all rollouts, or those on `sessions`; see `abort_rollout`."""
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
        """Pause agents and engines inside the block; see `paused_rollout`."""
        return paused_rollout([self._address], self._engines, budget)

    def updating_weights(
        self,
        version: int,
        *,
        mode: PauseMode = PauseMode.ABORT,
        budget: UpdateBudget | None = None,
        unconsumed: MutableSequence[Sample] | None = None,
    ) -> AbstractAsyncContextManager[WeightUpdate]:
        """Pause the engines while the block loads the weights of `version`; see `WeightUpdater`.

        async with manager.updating_weights(3) as update:
            await update.apply(checkpoint)  # a folder that the engines can read, or a transfer
        report = update.report
        """
        updater = WeightUpdater(self._engines, [self._address], mode=mode, budget=budget, unconsumed=unconsumed)
        return updater.update(version)

    def abort_hooks(self, sessions: Collection[str] | None = None) -> AgentHooks:
        """Return the callbacks for `abort_rollout` to end all rollouts, or those on `sessions`.

        Without `sessions`, nothing begins until the last concurrent abort is cleared: rollouts without a session end as
        DRAINED.
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
                # Rollouts that begin from now on must not see this abort.
                self._signal = AbortSignal()

        return AgentHooks(
            f"agents on {self._address.url}",
            announce,
            partial(self._require_runner().ask_to_end, sessions),
            partial(self.stop_agents, sessions=sessions),
            clear,
        )

    async def stop_agents(self, seconds: float, *, sessions: Collection[str] | None = None) -> list[str]:
        """End the agents, or those on `sessions`: SIGTERM, then SIGKILL. Returns the sessions with survivors."""
        for signal in self._signals(sessions):
            signal.enforce(grace_s=seconds / 2)
        return await self._require_runner().wait_for_all(sessions, timeout_s=seconds)

    def signal_agent(self, session_id: str, number: int) -> bool:
        """Signal the process group of a session's program. Return whether there was one."""
        return self._require_runner().signal(session_id, number)

    async def delete(self, session_id: str) -> None:
        """Delete a session that was kept for a later rollout. A failure is only logged."""
        await self._give_back(session_id, None)

    async def _give_back(self, session_id: str, end: RolloutEnd | None) -> None:
        try:
            await self._client.delete(session_id, end)
        except SessionServerError as error:
            _log.warning(SESSION_NOT_DELETED, session_id=shorten_secrets(session_id), error=error.message)

    async def _create(self, task: AgentTask, signal: AbortSignal) -> SessionHandle:
        aborted = SessionServerError("the rollout was aborted before it began", code=GateClosed.code, was_refused=True)
        if signal.announced.done():
            raise aborted
        cancelled = asyncio.get_running_loop().create_future()
        give_up = (signal.announced, cancelled)
        resumes: Json = {} if task.resumes is None else {"resumes": task.resumes}
        if task.inherits is not None:
            resumes["inherits"] = task.inherits.to_json()
        body = {**task.session_fields, **resumes, "metadata": {**task.metadata, **task.session.get("metadata", {})}}
        creating = asyncio.create_task(self._client.create(body, give_up=give_up))

        async def give_back() -> None:
            # The request may still create a session, so wait for it as long as for a deletion.
            await asyncio.wait({creating}, timeout=self._client.deadlines.delete_s)
            creating.cancel()
            if creating.done() and not creating.cancelled() and creating.exception() is None:
                await self.delete(creating.result().session_id)

        try:
            # Shielded, because a session that is created after a cancellation must still be deleted.
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
        assert self._signal is not None, "use `async with SessionManager(...)`"
        if sessions is None:
            return [self._signal]
        return [live.signal for session_id, live in self._live.items() if session_id in sessions]

    def _require_runner(self) -> AgentRunner:
        assert self._runner is not None, "use `async with SessionManager(...)`"
        return self._runner


def _end_of(task: AgentTask, rollout: Rollout) -> RolloutEnd:
    # Only a function's reward is trusted; a program could write any.
    result = (rollout.agent_result or {}) if isinstance(task.agent, FunctionAgent) else {}
    reward = stated_number(result.get("reward"))
    return RolloutEnd(str(rollout.outcome.kind), rollout.outcome.detail[:_MOST_REASON], reward)


def set_aside(workdir: Path) -> None:
    """Rename the directory of an earlier life to `WORKDIR-life-N`."""
    # Agents tell the model their working directory, so each life has it at the same path.
    free = (workdir.with_name(f"{workdir.name}-life-{number}") for number in itertools.count(1))
    if workdir.exists():
        workdir.rename(next(path for path in free if not path.exists()))


def _fork_of(task: AgentTask, number: int) -> AgentTask:
    inherits = task.inherits
    assert inherits is not None, "a fork inherits"
    session, sampling = task.session, task.session_fields.get("sampling", {})
    if "seed" in sampling:  # an equal seed would sample the forked turn again
        seed = seed_of(f"{sampling['seed']},fork {number}".encode())
        session = {**session, "sampling": {**sampling, "seed": seed}}
    return replace(
        task,
        workdir=task.workdir / f"fork-{number}",
        session=session,
        metadata={**task.metadata, "forked_from": {"session_id": inherits.session_id, "turn": inherits.before}},
    )


def without_session(task: AgentTask) -> AgentTask:
    """Return `task` for another session: an id and a takeover are of one."""
    session = {name: value for name, value in task.session.items() if name not in ("session_id", "resumes")}
    return replace(task, session=session, resumes=None)


def rollout_without_session(task: AgentTask, outcome: Outcome, seconds: float, *, refusal: str = "") -> Rollout:
    """Return the rollout of a task that did not begin."""
    return Rollout(
        session_id=None,
        outcome=outcome,
        samples=(),
        # `refusal` is the server's error code.
        session={**empty_record(None, None, task.metadata), "refusals": {refusal: 1} if refusal else {}},
        agent_result=None,
        seconds=seconds,
    )

"""Early end of a rollout. Nothing invalid is trained, and every gate reopens (I8).

    report = await manager.abort(pending)  # a `SessionManager` that knows its engines

Sessions drain before engines abort, so a turn that an engine cuts short is stored ABORTED and answered 404, and no
agent continues from half an answer. Agents are killed before results are collected, and the holds leave the gates last.
A failure costs the time of its step only.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from functools import partial

from harness.engines.base import TokenProvider
from harness.machine.deadlines import attempt, bound_of_call, read_end, to_the_end
from harness.machine.log import get_logger
from harness.rollouts.client.connections import SessionServerAddress
from harness.rollouts.client.gate import new_holder
from harness.rollouts.client.session_server import SessionServerClient
from harness.rollouts.control.abort_report import (
    AbortBudget,
    AbortReport,
    AbortStep,
    AgentHooks,
    CallReport,
    Keep,
    TaskFailure,
    failure_of,
    partial_samples,
)
from harness.rollouts.control.abort_scope import AbortScope, NamedSessions, WholeServers
from harness.rollouts.control.engines import EngineWorker, as_workers, learn_workers

ABORT_STEP_ENDED = "abort_step_ended"
ABORT_PROBLEM = "abort_problem"
ABORTED_TASK_SKIPPED = "aborted_task_skipped"

_RELEASE_SHARE = 0.8  # of the last step; the rest is kept for hooks to be cleared

_log = get_logger(__name__)


async def abort_rollout(
    pending: Iterable[Awaitable[object]],
    *,
    session_servers: Sequence[SessionServerAddress | str],
    engine_workers: Sequence[TokenProvider | EngineWorker | str] = (),
    agent_hooks: Sequence[AgentHooks] = (),
    budget: AbortBudget | None = None,
    keep: Keep = Keep.SAMPLES,
    rollout_id: int | None = None,
    continue_engines: bool = False,
    sessions: Collection[str] | None = None,
) -> AbortReport:
    """End everything that `pending` waits for, and collect the results.

    Args:
        pending: Tasks of the rollout; `AbortReport.results` holds what they return.
        session_servers: Every server of the rollout's agents.
        engine_workers: Their engines: `sglang=http://...`, `vllm=http://...`, an address, a provider, an
            `EngineWorker`, or `router=http://...` for the workers of a `harness router`.
        agent_hooks: Callbacks of the agents' runners.
        budget: Time limits.
        keep: What to keep of rollouts cut short.
        rollout_id: Default `start_rollout_id` of partial samples.
        continue_engines: Continue workers paused under no hold, if every gate is known. Otherwise report them.
        sessions: Ids of the sessions to end; None ends all. With ids, `pending` and `agent_hooks` must be theirs, and
            gates and `engine_workers` stay untouched.

    Reports failures instead of raising, except of `learn_workers`, before anything has changed. On cancellation
    it cancels `pending` and opens the gates.
    """
    tasks = [asyncio.ensure_future(each) for each in pending]
    async with AsyncExitStack() as stack:
        budget, holder, began = budget or AbortBudget(), new_holder("abort"), time.monotonic()
        servers = [await stack.enter_async_context(SessionServerClient(each)) for each in session_servers]
        scope: AbortScope
        if sessions is not None:
            scope = NamedSessions(servers, sessions)
        else:
            gates = [server.gate(holder, budget.hold_ttl_s) for server in servers]
            try:
                learn_s = budget.left_s(budget.engines_s, 0)
                workers = as_workers(await learn_workers(engine_workers, session_servers, learn_s))
            except asyncio.CancelledError:
                for task in tasks:
                    task.cancel()
                raise
            scope = WholeServers(gates, workers, continues=continue_engines)
        abort = _Abort(tasks, scope, agent_hooks, budget, began)
        try:
            async with scope.hold():
                await abort.mark(keep)
                await abort.drain()
                await abort.abort_engines()
                await abort.call_hooks()
                await abort.stop_agents()
                await abort.collect()
        finally:
            await to_the_end(abort.leave_open())
        return abort.report(keep, rollout_id)


class _Abort:
    def __init__(
        self,
        tasks: Sequence[asyncio.Future[object]],
        scope: AbortScope,
        hooks: Sequence[AgentHooks],
        budget: AbortBudget,
        began: float,
    ) -> None:
        self._tasks = tasks
        self._scope = scope
        self._hooks = hooks
        self._budget = budget
        self._began = began
        self._learned_s = time.monotonic() - began  # learning the workers counts as time of the engines step
        self._seconds: dict[AbortStep, float] = {}
        self._late: set[asyncio.Future[object]] = set()
        self._report = AbortReport(seconds=self._seconds)

    async def mark(self, keep: Keep) -> None:
        with self._step(AbortStep.MARK, self._budget.hooks_s) as seconds:
            await self._tell([(hooks.name, partial(hooks.mark, keep)) for hooks in self._hooks], seconds)

    async def drain(self) -> None:
        with self._step(AbortStep.DRAIN, self._budget.drain_s) as seconds:
            drained = await self._scope.drain(seconds)
            self._report = replace(self._report, drained=tuple(drained))

    async def abort_engines(self) -> None:
        with self._step(AbortStep.ENGINES, self._budget.engines_s) as seconds:
            quiet = await self._scope.quieten(self._report.drained, seconds)
            engines, left_paused = tuple(quiet.engines), tuple(quiet.left_paused)
            self._report = replace(self._report, engines=engines, left_paused=left_paused, turns_left=quiet.turns_left)
        self._seconds[AbortStep.ENGINES] += self._learned_s

    async def call_hooks(self) -> None:
        with self._step(AbortStep.HOOKS, self._budget.hooks_s) as seconds:
            calls = (_call(hooks.name, hooks.abort, seconds) for hooks in self._hooks if hooks.abort)
            self._note_calls(await asyncio.gather(*calls))

    async def stop_agents(self) -> None:
        with self._step(AbortStep.STOP, self._budget.agents_s + self._budget.kill_s) as seconds:
            kill_s = min(self._budget.kill_s, seconds)
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=seconds - kill_s)
            await asyncio.gather(*(self._stop(hooks, kill_s) for hooks in self._hooks))

    async def collect(self) -> None:
        # `gather(*pending)` alone would hang on a task that ignores its cancellation. So a bounded wait comes first,
        # and only tasks that have ended are gathered.
        with self._step(AbortStep.COLLECT, self._budget.collect_s) as seconds:
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=seconds)
            await self._cancel_late()
            ended = [task for task in self._tasks if task.done()]
            left = [task for task in self._tasks if not task.done()]
            results, failures = list[object](), list[TaskFailure]()
            for task, end in zip(ended, await asyncio.gather(*ended, return_exceptions=True), strict=True):
                if isinstance(end, BaseException):
                    failures.append(failure_of(task, end, was_late=task in self._late))
                else:
                    results.append(end)
            failures += (failure_of(task, None, was_late=True) for task in left)
            self._report = replace(self._report, results=tuple(results), failures=tuple(failures))
            for failure in failures:
                _log.warning(ABORTED_TASK_SKIPPED, task=failure.name, fate=failure.fate.value, detail=failure.detail)

    async def leave_open(self) -> None:
        # Runs after errors and cancellation too: first nothing of the rollout is left, then the gates open.
        try:
            async with self._scope.hold():
                await self._cancel_late()
        finally:
            with self._step(AbortStep.RESUME, self._budget.resume_s, is_last=True) as seconds:
                began = time.monotonic()
                try:
                    resumed = await self._scope.release(_RELEASE_SHARE * seconds)
                    self._report = replace(self._report, resumed=tuple(resumed))
                finally:
                    clear_s = bound_of_call(seconds - (time.monotonic() - began))
                    await self._tell([(hooks.name, hooks.clear) for hooks in self._hooks], clear_s)

    def report(self, keep: Keep, rollout_id: int | None) -> AbortReport:
        samples = partial_samples(self._report.results, rollout_id) if keep is not Keep.NOTHING else ()
        report = replace(self._report, partial_samples=samples)
        for problem in report.problems:
            _log.warning(ABORT_PROBLEM, problem=problem)
        return report

    async def _stop(self, hooks: AgentHooks, seconds: float) -> None:
        if hooks.stop is None:
            return
        left: list[str] = []

        async def stop() -> None:
            assert hooks.stop is not None
            left.extend(await hooks.stop(bound_of_call(seconds)))  # so that its own bound comes first

        answer = await _call(hooks.name, stop, seconds)
        self._report = replace(self._report, agents_left=(*self._report.agents_left, *left))
        self._note_calls([answer] if answer.error else [])

    async def _tell(self, calls: Iterable[tuple[str, Callable[[], Awaitable[object] | None]]], seconds: float) -> None:
        # All hooks start before any is awaited, so that one slow hook does not delay the others.
        waits = []
        for name, call in calls:
            try:
                told = call()
            except Exception as error:  # noqa: BLE001  # a hook is foreign code; the abort continues
                self._note_calls([CallReport(name, f"{type(error).__name__}: {error}")])
                continue
            if told is not None:
                waits.append(_end(name, told, seconds))
        self._note_calls([answer for answer in await asyncio.gather(*waits) if answer.error])

    def _note_calls(self, calls: Iterable[CallReport]) -> None:
        self._report = replace(self._report, hooks=(*self._report.hooks, *calls))

    async def _cancel_late(self) -> None:
        late = [task for task in self._tasks if not task.done() and task not in self._late]
        for task in late:
            self._late.add(task)
            task.add_done_callback(read_end)  # a task that ignores this still has its exception retrieved
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=self._budget.cancel_s)

    @contextmanager
    def _step(self, step: AbortStep, wanted_s: float, *, is_last: bool = False) -> Iterator[float]:
        began = time.monotonic()
        try:
            yield wanted_s if is_last else self._budget.left_s(wanted_s, began - self._began)
        finally:
            self._seconds[step] = time.monotonic() - began
            _log.info(ABORT_STEP_ENDED, step=step.value, seconds=round(self._seconds[step], 3))


async def _end(name: str, work: Awaitable[object], seconds: float) -> CallReport:
    return await _call(name, lambda: work, seconds)


async def _call(name: str, call: Callable[[], Awaitable[object]], seconds: float) -> CallReport:
    return CallReport(name, await attempt(call, seconds, name=f"abort: {name}"))

"""Runs one agent to its end and leaves nothing of it behind. `manager.py` knows how the session fared."""

import asyncio
import math
import os
import shlex
import shutil
import signal as signal_module
from collections.abc import Awaitable, Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar, assert_never

from harness.dialects.openai_chat import base_url
from harness.errors import AgentError, CannotListen, SandboxFailed
from harness.machine.deadlines import ended, to_the_end
from harness.machine.disk import make_way
from harness.machine.watchdog import Watchdog
from harness.rollouts.abort_signal import AbortSignal, ends_before
from harness.rollouts.agents.agent_environment import (
    LOG_FILE,
    OUR_PYTHON,
    RESULT_FILE,
    agent_environment,
    boxed_environment,
    find_programs,
    home_of,
    prepare_home,
    prepare_workdir,
    without_session,
)
from harness.rollouts.agents.agent_output import AgentLog, read_result
from harness.rollouts.agents.function import FunctionAgents
from harness.rollouts.agents.process import AgentProcess
from harness.rollouts.agents.profile import expand
from harness.rollouts.agents.task import AgentTask, FunctionAgent, ProgramAgent
from harness.rollouts.client.session_server import SessionHandle
from harness.rollouts.outcome import AgentEnd, AgentRun, Ending
from harness.rollouts.sandboxes.sandbox import RunningCommand

if TYPE_CHECKING:
    from harness.rollouts.sandboxes.boxed import Box, LeftBehind

_T = TypeVar("_T")

_SHELL_SIGNAL = 128  # what shells, bwrap and container engines add to the number of a signal


class _Running(NamedTuple):
    task: AgentTask
    ended: asyncio.Future[None]


class AgentRunner:
    def __init__(self, *, grace_s: float) -> None:
        self._grace_s = grace_s
        self._functions = FunctionAgents(grace_s=grace_s)
        self._watchdog = Watchdog()
        self._running: dict[str, _Running] = {}
        self._processes: dict[str, RunningCommand] = {}
        self._cleaning: dict[str, asyncio.Task[LeftBehind]] = {}
        # Searches for what dead managers left, by kind of sandbox.

    async def close(self) -> None:
        """End every remaining agent, and the watchdog."""
        for cleaning in self._cleaning.values():
            cleaning.cancel()
            await to_the_end(ended(cleaning))
        try:
            await self._functions.close()
        finally:
            await self._watchdog.close()

    async def run(self, task: AgentTask, session: SessionHandle, signal: AbortSignal) -> AgentRun:
        """Run `task.agent` until it ends, its deadline passes, or `signal` is enforced."""
        ended = asyncio.get_running_loop().create_future()
        self._running[session.session_id] = _Running(task, ended)
        try:
            return await self._run(task, session, signal)
        finally:
            ended.set_result(None)
            del self._running[session.session_id]

    def signal(self, session_id: str, number: int) -> bool:
        """Signal the process group of a session's program. Return whether there was one."""
        process = self._processes.get(session_id)
        return process is not None and process.signal(number)

    async def ask_to_end(self, sessions: Collection[str] | None = None) -> None:
        """Call the abort functions of all running agents, or of those on `sessions`. Raises `AgentError` afterwards."""

        async def ask(session_id: str, task: AgentTask) -> None:
            if isinstance(task.agent, FunctionAgent) and task.agent.abort is not None:
                await task.agent.abort(session_id=session_id, metadata=dict(task.metadata), **task.agent.kwargs)

        asking = [ask(session_id, running.task) for session_id, running in self._running_on(sessions).items()]
        answers = await asyncio.gather(*asking, return_exceptions=True)
        failures = [answer for answer in answers if isinstance(answer, Exception)]
        if failures:
            raise AgentError(f"{len(failures)} of {len(answers)} agents could not be asked to end: {failures[0]!r}")

    async def wait_for_all(self, sessions: Collection[str] | None = None, *, timeout_s: float) -> list[str]:
        """Wait until no agent runs, or none on `sessions`. Return the sessions still in use."""
        waited_for = self._running_on(sessions)
        if waited_for:
            await asyncio.wait([running.ended for running in waited_for.values()], timeout=timeout_s)
        return [session_id for session_id, running in waited_for.items() if not running.ended.done()]

    def _running_on(self, sessions: Collection[str] | None) -> dict[str, _Running]:
        return {
            session_id: running
            for session_id, running in self._running.items()
            if sessions is None or session_id in sessions
        }

    async def _run(self, task: AgentTask, session: SessionHandle, signal: AbortSignal) -> AgentRun:
        try:
            await asyncio.to_thread(prepare_workdir, task)
            log = AgentLog(task.workdir / LOG_FILE, task.on_output)
        except (OSError, ValueError) as error:
            return AgentRun(AgentEnd(Ending.NOT_PREPARED, detail=str(error)))
        with log:
            match task.agent:
                case ProgramAgent():
                    return await self._run_program(task.agent, task, session, log, signal)
                case FunctionAgent():
                    arguments = {
                        "base_url": base_url(session.base_url),
                        "prompt": task.prompt,
                        "request_kwargs": {"model": task.model, **task.request_kwargs},
                        "metadata": dict(task.metadata),
                        "session_id": session.session_id,
                        "api_key": session.api_key,
                    }
                    call = await self._functions.run(task.agent, arguments, deadline_s=task.deadline_s, signal=signal)
                    log.write(call.trace.encode(errors="replace"))
                    return call
                case _:
                    assert_never(task.agent)

    async def _run_program(
        self, agent: ProgramAgent, task: AgentTask, session: SessionHandle, log: AgentLog, signal: AbortSignal
    ) -> AgentRun:
        try:
            async with AsyncExitStack() as stack:
                box = await self._open_box(agent, task, session, signal, stack)
                if isinstance(box, AgentEnd):
                    return AgentRun(box)
                try:
                    process = await self._start(agent, task, session, log, box)
                except (OSError, ValueError) as error:
                    return AgentRun(AgentEnd(Ending.NOT_STARTED, detail=str(error)))
                self._processes[session.session_id] = process
                end = await self._await_end(process, task.deadline_s, signal, box)
                if task.after is not None and box is not None and end.ending not in (Ending.STOPPED, Ending.BOX_FAILED):
                    start = partial(AgentProcess.start, log=log, watchdog=self._watchdog)
                    end = await self._run_after(task.after(box.sandbox, start), end, signal)
        except SandboxFailed as error:
            end = AgentEnd(Ending.BOX_FAILED, detail=error.message)
        finally:
            self._processes.pop(session.session_id, None)
            # The directory holds the session's key and the agent's memory of it. Removed even under cancellation.
            if agent.home is not None or task.box is not None:
                await to_the_end(asyncio.to_thread(make_way, home_of(task)))
        return AgentRun(end, read_result(task.workdir / RESULT_FILE))

    async def _open_box(
        self, agent: ProgramAgent, task: AgentTask, session: SessionHandle, signal: AbortSignal, stack: AsyncExitStack
    ) -> "Box | AgentEnd | None":
        """Return the started sandbox, the agent's end if the rollout ended before, or None without a sandbox."""
        spec = task.box
        if spec is None:
            return None
        # A box needs more packages than a trainer without boxes has to have.
        from harness.rollouts.sandboxes.boxed import open_box, remove_left

        if spec.kind not in self._cleaning:
            self._cleaning[spec.kind] = asyncio.create_task(remove_left({spec.kind}), name="remove left sandboxes")

        async def open_clean() -> "Box":
            try:
                await asyncio.shield(self._cleaning[spec.kind])
                shown = await asyncio.to_thread(find_programs, agent)
                box = open_box(spec, task.workdir.absolute(), shown, session, OUR_PYTHON)
                return await stack.enter_async_context(box)
            except (OSError, CannotListen) as error:
                raise SandboxFailed(f"its sandbox cannot be made: {error}") from error

        # An image may have to be pulled first, and neither an abort nor the deadline waits for that.
        opening = await _run_until_enforced(open_clean(), signal, task.deadline_s)
        if not opening.cancelled():
            return opening.result()
        if signal.enforced.done() or self._cleaning[spec.kind].cancelled():
            return AgentEnd(Ending.STOPPED, detail="its sandbox was not ready")
        raise SandboxFailed(f"expected a sandbox within {task.deadline_s:g} s; pull its image before, or wait longer")

    async def _run_after(self, after: Awaitable[None], end: AgentEnd, signal: AbortSignal) -> AgentEnd:
        """Await `after`, for as long as its author lets it, and return the agent's end unless an abort came first."""
        running = await _run_until_enforced(after, signal, math.inf)
        if running.cancelled():
            return AgentEnd(Ending.STOPPED, detail="its follow-up did not end")
        running.result()
        return end

    async def _start(
        self, agent: ProgramAgent, task: AgentTask, session: SessionHandle, log: AgentLog, box: "Box | None"
    ) -> RunningCommand:
        session = session if box is None else box.session
        env, command = agent_environment(agent, task, session, os.environ), agent.command
        if agent.home is not None or box is not None:
            prepare_home(agent.home or {}, task, env)
        if agent.home is not None:
            command = tuple(expand(word, env) for word in command)
        if not agent.key_in_environment:
            env = without_session(env, session)
        cwd = (task.cwd or task.workdir / agent.cwd).absolute()
        start = partial(AgentProcess.start, log=log, watchdog=self._watchdog, terminal=task.terminal)
        if box is None:
            return await start(after_setup(agent.setup, resolve_command(command, env.get("PATH"), cwd)), env, cwd)
        env = boxed_environment(env, agent, task)
        own = str(cwd / command[0]) if (cwd / command[0]).is_file() else command[0]
        return await box.exec(after_setup(agent.setup, (own, *command[1:])), env=env, cwd=cwd, on_host=start)

    async def _await_end(
        self, process: RunningCommand, deadline_s: float, signal: AbortSignal, box: "Box | None"
    ) -> AgentEnd:
        exit_code = asyncio.create_task(process.wait())
        try:
            if await ends_before(exit_code, signal.enforced, timeout_s=deadline_s):
                code = exit_code.result()
                if box is not None and _SHELL_SIGNAL < code <= _SHELL_SIGNAL + signal_module.NSIG:
                    code = _SHELL_SIGNAL - code
                end = AgentEnd(Ending.KILLED, -code) if code < 0 else AgentEnd(Ending.EXITED, code)
                failure = await box.sandbox.find_failure() if box is not None and code != 0 else None
                if failure is not None:
                    end = AgentEnd(Ending.BOX_FAILED, detail=failure)
            elif signal.enforced.done():
                end = AgentEnd(Ending.STOPPED)
            else:
                end = AgentEnd(Ending.TIMED_OUT, detail=f"after {deadline_s:g} s")
        finally:
            # Also under cancellation: nothing of the agent may outlive this call.
            left = await process.stop(grace_s=min(self._grace_s, signal.grace_s))
            exit_code.cancel()
        return replace(end, left=left, is_boxed=box is not None)


async def _run_until_enforced(work: Awaitable[_T], signal: AbortSignal, timeout_s: float) -> asyncio.Future[_T]:
    """Return the ended `work`, cancelled when `signal` is enforced or the time is over."""
    running = asyncio.ensure_future(work)
    try:
        await ends_before(running, signal.enforced, timeout_s=timeout_s)
    finally:
        running.cancel()
        await to_the_end(ended(running))
    return running


def resolve_command(command: Sequence[str], search_path: str | None, workdir: Path) -> tuple[str, ...]:
    """Return `command` with an absolute program path. Raises `FileNotFoundError`."""
    copied = workdir / command[0]
    program = shutil.which(copied if copied.is_file() else command[0], path=search_path)
    if program is None:
        raise FileNotFoundError(f"no program {command[0]!r}")
    return (str(Path(program).absolute()), *command[1:])


def after_setup(setup: Sequence[str], command: tuple[str, ...]) -> tuple[str, ...]:
    """Return a command that runs `setup`, then becomes `command`, or ends with 126."""
    if not setup:
        return command
    failed = 'echo "setup ended with exit code $?; the agent was not started" >&2; exit 126'
    return ("/bin/sh", "-c", f'{shlex.join(setup)} || {{ {failed}; }}; exec "$@"', "sh", *command)

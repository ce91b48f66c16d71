"""Runs one agent to its end, program or function, and leaves nothing of it behind.

Knows the working directory of a rollout (`instruction.md` in, `result.json` and `agent.log` out) and the deadline.
Knows nothing of how the session fared; see `manager.py`.
"""

import asyncio
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, assert_never

from harness.manager.agent_log import AgentLog
from harness.manager.agent_result import AgentResult, read_result, result_of_value
from harness.manager.environment import (
    LOG_FILE,
    RESULT_FILE,
    agent_environment,
    openai_base_url,
    prepare_workdir,
)
from harness.manager.function_agent import FunctionAgents
from harness.manager.outcome import AgentEnd, Ending
from harness.manager.process import AgentProcess
from harness.manager.rollout import AgentTask, FunctionAgent, ProgramAgent
from harness.manager.session_client import SessionHandle
from harness.manager.watchdog import Watchdog


class AgentRun(NamedTuple):
    """An agent that has ended, and what it handed back."""

    end: AgentEnd
    result: AgentResult = AgentResult()


class AgentRunner:
    """Starts and ends agents; closing it ends whatever is still there."""

    def __init__(self, *, grace_s: float) -> None:
        self._grace_s = grace_s
        self._functions = FunctionAgents(grace_s=grace_s)
        self._watchdog = Watchdog()

    async def close(self) -> None:
        """End every agent that is left, and the watchdog."""
        try:
            await self._functions.close()
        finally:
            await self._watchdog.close()

    async def run(self, task: AgentTask, session: SessionHandle) -> AgentRun:
        """Run `task.agent` on `session` until it ends or its deadline has passed."""
        try:
            prepare_workdir(task.workdir, task.prompt)
            log = AgentLog(task.workdir / LOG_FILE)
        except OSError as error:
            return AgentRun(AgentEnd(Ending.NOT_PREPARED, detail=str(error)))
        with log:
            match task.agent:
                case ProgramAgent():
                    return await self._run_program(task.agent, task, session, log)
                case FunctionAgent():
                    return await self._run_function(task.agent, task, session, log)
                case _:
                    assert_never(task.agent)

    async def _run_program(
        self, agent: ProgramAgent, task: AgentTask, session: SessionHandle, log: AgentLog
    ) -> AgentRun:
        env = agent_environment(agent, task, session, os.environ)
        try:
            command = resolve_command(agent.command, env.get("PATH"))
            process = await AgentProcess.start(command, env=env, workdir=task.workdir, log=log, watchdog=self._watchdog)
        except (OSError, ValueError) as error:
            return AgentRun(AgentEnd(Ending.NOT_STARTED, detail=str(error)))
        end = await self._await_end(process, task.deadline_s)
        return AgentRun(end, read_result(task.workdir / RESULT_FILE))

    async def _await_end(self, process: AgentProcess, deadline_s: float) -> AgentEnd:
        """How the process ended; nothing of its group is left when this returns or raises."""
        try:
            async with asyncio.timeout(deadline_s):
                return _end_of_process(await process.wait())
        except TimeoutError:
            return AgentEnd(Ending.TIMED_OUT, detail=f"after {deadline_s:g} s")
        finally:
            await process.stop(grace_s=self._grace_s)

    async def _run_function(
        self, agent: FunctionAgent, task: AgentTask, session: SessionHandle, log: AgentLog
    ) -> AgentRun:
        ended = await self._functions.run(agent, _function_arguments(task, session), deadline_s=task.deadline_s)
        log.write(ended.trace.encode(errors="replace"))
        return AgentRun(ended.end, result_of_value(ended.value))


def resolve_command(command: Sequence[str], search_path: str | None) -> tuple[str, ...]:
    """`command` with its program as an absolute path; raises `FileNotFoundError` when there is no such program."""
    program = shutil.which(command[0], path=search_path)
    if program is None:
        raise FileNotFoundError(f"no program {command[0]!r}")
    return (str(Path(program).absolute()), *command[1:])


def _function_arguments(task: AgentTask, session: SessionHandle) -> Mapping[str, Any]:
    return {
        "base_url": openai_base_url(session),
        "prompt": task.prompt,
        "request_kwargs": {"model": task.model, **task.request_kwargs},
        "metadata": dict(task.metadata),
        "session_id": session.session_id,
        "api_key": session.api_key,
    }


def _end_of_process(code: int) -> AgentEnd:
    return AgentEnd(Ending.KILLED, -code) if code < 0 else AgentEnd(Ending.EXITED, code)

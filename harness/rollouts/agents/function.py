"""Agents that are async functions of this process. One that blocks the event loop cannot be ended."""

import asyncio
import traceback
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from typing import Any

from harness.machine.deadlines import read_end
from harness.machine.log import get_logger
from harness.rollouts.abort_signal import AbortSignal, ends_before
from harness.rollouts.agents.result import result_of_value
from harness.rollouts.agents.task import FunctionAgent
from harness.rollouts.outcome import AgentEnd, AgentRun, Ending

AGENT_LEFT_BEHIND = "agent_left_behind"

_log = get_logger(__name__)


class FunctionAgents:
    def __init__(self, *, grace_s: float) -> None:
        self._grace_s = grace_s
        self._cancelled: set[asyncio.Task[AgentRun]] = set()

    async def run(
        self, agent: FunctionAgent, arguments: Mapping[str, Any], *, deadline_s: float, signal: AbortSignal
    ) -> AgentRun:
        """Call `agent`. Returns at most the grace period after `deadline_s`."""
        call = asyncio.create_task(_call(agent, arguments), name=f"agent {agent.name}")
        try:
            has_ended = await ends_before(call, signal.enforced, timeout_s=deadline_s)
        finally:
            if not call.done():
                self._cancelled.add(call)
                call.add_done_callback(self._cancelled.discard)
                call.cancel()
                await asyncio.wait({call}, timeout=min(self._grace_s, signal.grace_s))
                if not call.done():
                    # It is left behind, so that its rollout can be reported.
                    _log.warning(AGENT_LEFT_BEHIND, agent=call.get_name())
                    call.add_done_callback(read_end)
        if has_ended:
            is_own = call.cancelled()
            return AgentRun(AgentEnd(Ending.RAISED, detail="cancelled itself")) if is_own else call.result()
        ending = Ending.STOPPED if signal.enforced.done() else Ending.TIMED_OUT
        return AgentRun(AgentEnd(ending, detail="" if call.done() else "ignores its cancellation"))

    async def close(self) -> None:
        """End left-behind functions, in bounded time."""
        # A second cancellation, then a closed coroutine: otherwise the loop could not end before the function.
        for close in (False, True):
            for call in tuple(self._cancelled):
                coroutine = call.get_coro()
                if close and isinstance(coroutine, Coroutine):
                    with suppress(RuntimeError):  # it ignores even that
                        coroutine.close()
                call.cancel()
            if self._cancelled:
                await asyncio.wait(self._cancelled, timeout=self._grace_s)


async def _call(agent: FunctionAgent, arguments: Mapping[str, Any]) -> AgentRun:
    try:
        value = await agent.run(**arguments, **agent.kwargs)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # anything it raises is its outcome
        detail = "".join(traceback.format_exception_only(error)).strip()
        return AgentRun(AgentEnd(Ending.RAISED, detail=detail), trace=traceback.format_exc())
    return AgentRun(AgentEnd(Ending.RETURNED), result_of_value(value))

"""Agents that are async functions of this process. One that blocks the event loop cannot be ended.

In a Python file, `play.py:run`, which has all rights of this process (docs/security.md):

    async def run(base_url, prompt, request_kwargs, metadata, **kwargs) -> dict | None: ...
"""

import ast
import asyncio
import importlib
import itertools
import sys
import traceback
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from harness.errors import ScenarioError
from harness.machine.deadlines import read_end
from harness.machine.log import get_logger
from harness.rollouts.abort_signal import AbortSignal, ends_before
from harness.rollouts.agents.agent_output import result_of_value
from harness.rollouts.agents.task import FunctionAgent
from harness.rollouts.outcome import AgentEnd, AgentRun, Ending

GIVEN = ("base_url", "prompt", "request_kwargs", "metadata", "session_id", "api_key")

_loaded = itertools.count()


@dataclass(frozen=True, slots=True)
class FunctionFile:
    path: Path
    name: str

    def check(self) -> None:
        """Parse the file, and raise `ScenarioError` unless it has the function and that accepts `GIVEN`."""
        try:
            tree = ast.parse(self.path.read_bytes(), filename=self.path.name)
        except FileNotFoundError:
            raise ScenarioError(
                f"expected a file of the scenario, got {self.path.name!r}, which does not exist"
            ) from None
        except (OSError, SyntaxError, ValueError) as error:
            raise ScenarioError(f"expected a Python file, got {self.path.name!r}: {error}") from None
        named = [
            each
            for each in tree.body
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name == self.name
        ]
        if not named or not isinstance(named[-1], ast.AsyncFunctionDef):
            got = "a `def` without async" if named else "none"
            raise ScenarioError(f"expected an `async def {self.name}` at the top level of {self.path.name}, got {got}")
        _check_arguments(named[-1].args, f"{self.path.name}:{self.name}")

    def load(self) -> FunctionAgent:
        """Run the file again and return its function. Raises `ScenarioError`."""
        return FunctionAgent(f"{self.path.name}:{self.name}", load_named(self.path, self.name))


def load_named(path: Path, name: str) -> Any:
    """Run the file again and return its `name`. Raises `ScenarioError`."""
    # In a package of its own `from .game import Game` finds the neighbor, equal names in two folders never meet, and
    # `sys.path` is unchanged.
    package = ModuleType(f"harness_scenario_{next(_loaded)}")
    package.__path__ = [str(path.parent)]
    sys.modules[package.__name__] = package
    importlib.invalidate_caches()
    try:
        return getattr(importlib.import_module(f"{package.__name__}.{path.stem}"), name)
    except (Exception, SystemExit) as error:
        where = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = f" (line {where[-1]})" if where else ""
        raise ScenarioError(f"{path} cannot be loaded: {type(error).__name__}: {error}{line}") from error


def _check_arguments(arguments: ast.arguments, where: str) -> None:
    positional = arguments.posonlyargs + arguments.args
    required = {argument.arg for argument in positional[: len(positional) - len(arguments.defaults)]}
    required |= {
        argument.arg
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    }
    by_keyword = {argument.arg for argument in arguments.args + arguments.kwonlyargs}
    asked = sorted(required - (by_keyword & {*GIVEN}))
    if asked:
        raise ScenarioError(f"expected {where} to need no more than {', '.join(GIVEN)}, got {', '.join(asked)}")
    left = [name for name in GIVEN if name not in by_keyword]
    if left and arguments.kwarg is None:
        raise ScenarioError(f"expected {where} to take {', '.join(left)}, or `**kwargs`")


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

"""What runs on one node: a session server, and the agents of its sessions. Knows nothing of Ray.

Agents talk to the server of their own node, so a turn crosses no network but the one to the engine, and a node that is
lost takes with it its own sessions and no others.
"""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import NamedTuple

from harness.client.connections import SessionServerAddress
from harness.control.abort_report import AgentHooks, Keep
from harness.engines.connect import open_engine
from harness.errors import AdapterError
from harness.machine.deadlines import read_end
from harness.rollouts.agents.task import AgentTask
from harness.rollouts.manager import SessionManager
from harness.samples.rollout import Rollout
from harness.server.serving import serve
from harness.server.settings import ServerSettings
from harness.store.connect import open_store
from harness.tokens.model_family import open_chat_tokenizer
from harness.types import Sample

ABORT_S = 600.0
"""Seconds after which an abort is over whose controller has not said so; longer than one takes."""


@dataclass(frozen=True, slots=True)
class NodeSetup:
    """The same for every node."""

    engine: str
    """As for `harness serve --engine`: `sglang=URL[,URL]`, `vllm=URL[,URL]`; `scripted` has one of each node's own."""
    tokenizer: str
    """Folder with the model's tokenizer, at this path on every node."""
    admin_token: str = field(repr=False)
    """Opens the admin verbs of every node; a controller that comes later needs the same one."""
    store: str = "memory"
    """`memory`, or the path of a file on the node's own disk."""
    script: str | None = None
    """For the scripted engine."""


class _Serving(NamedTuple):
    """A node that was started."""

    stack: AsyncExitStack
    """Ends it."""
    address: SessionServerAddress
    manager: SessionManager


class RolloutNode:
    """A session server and a manager of rollouts, both started by `start`."""

    def __init__(self, setup: NodeSetup) -> None:
        self._setup = setup
        self._starting: asyncio.Task[_Serving] | None = None
        self._aborts: dict[str, AgentHooks] = {}

    async def start(self, setup: NodeSetup, host: str) -> SessionServerAddress:
        """Serve sessions at `host`, a free port; where it does so already, or begins to, this only says where.

        One start is that of every controller that asks, and goes on when one of them is gone. Raises `AdapterError`
        for another setup than it was started with, and what keeps a server from starting.
        """
        others = [each.name for each in fields(setup) if getattr(setup, each.name) != getattr(self._setup, each.name)]
        if others:
            raise AdapterError(f"an earlier controller has started it with another {', another '.join(others)}")
        if self._starting is None or (self._starting.done() and self._serving is None):
            self._starting = asyncio.create_task(self._open(host), name="ray node: start")
            self._starting.add_done_callback(read_end)  # whoever waits for it may be gone
        return (await asyncio.shield(self._starting)).address

    async def run(self, task: AgentTask) -> tuple[Rollout, tuple[Sample, ...]]:
        """The rollout of `task` without its samples, and these."""
        rollout = await self._require_manager().run(task)
        return replace(rollout, samples=()), rollout.samples

    async def mark(self, abort: str, keep: Keep) -> None:
        """The step of `SessionManager.abort_hooks` of this name; so are the next three. `abort` is its id.

        It is over after `ABORT_S` also where nobody says so: its controller may be lost, and the node is not.
        """
        self._aborts[abort] = hooks = self._require_manager().abort_hooks()
        asyncio.get_running_loop().call_later(ABORT_S, self._clear, abort)
        hooks.mark(keep)

    async def ask_agents(self) -> None:
        """Ask the agents to stop."""
        ask = self._require_manager().abort_hooks().abort
        assert ask is not None
        await ask()

    async def stop_agents(self, seconds: float) -> list[str]:
        """End the agents that still run; the sessions of those that are left even then."""
        return await self._require_manager().stop_agents(seconds)

    async def clear(self, abort: str) -> None:
        """The abort of that id is over. Idempotent."""
        self._clear(abort)

    async def stop(self) -> None:
        """End agents and server. Idempotent."""
        starting, self._starting = self._starting, None
        if starting is None:
            return
        starting.cancel()
        await asyncio.wait({starting})
        if not starting.cancelled() and starting.exception() is None:
            await starting.result().stack.aclose()

    def _clear(self, abort: str) -> None:
        if hooks := self._aborts.pop(abort, None):
            hooks.clear()

    async def _open(self, host: str) -> _Serving:
        setup = self._setup
        tokenizer = open_chat_tokenizer(Path(setup.tokenizer))
        script = None if setup.script is None else Path(setup.script)
        engine = open_engine(setup.engine, tokenizer=tokenizer.tokenizer, script=script)
        settings = ServerSettings(host=host, port=0, admin_token=setup.admin_token)
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(serve(engine, tokenizer, open_store(setup.store), settings))
            manager = SessionManager(server.url, admin_token=setup.admin_token)
            await stack.enter_async_context(manager)
            return _Serving(stack.pop_all(), SessionServerAddress(server.url, setup.admin_token), manager)

    @property
    def _serving(self) -> _Serving | None:
        starting = self._starting
        if starting is None or not starting.done() or starting.cancelled() or starting.exception() is not None:
            return None
        return starting.result()

    def _require_manager(self) -> SessionManager:
        if self._serving is None:
            raise AdapterError("the node has not been started")
        return self._serving.manager

"""What runs on one node: a session server, and the agents of its sessions. Knows nothing of Ray.

Agents talk to the server of their own node, so a turn crosses no network but the one to the engine, and a node that is
lost takes with it its own sessions and no others.
"""

from contextlib import AsyncExitStack
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Self

from harness.client.connections import SessionServerAddress
from harness.control.abort_report import Keep
from harness.engines.connect import open_engine
from harness.errors import AdapterError
from harness.rollouts.agents.task import AgentTask
from harness.rollouts.manager import SessionManager
from harness.samples.rollout import Rollout
from harness.server.serving import serve
from harness.server.settings import ServerSettings
from harness.store.connect import open_store
from harness.tokens.model_family import open_chat_tokenizer
from harness.types import Sample


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


class RolloutNode:
    """A session server and a manager of rollouts, both started by `start`."""

    def __init__(self, setup: NodeSetup) -> None:
        self._setup = setup
        self._stack = AsyncExitStack()
        self._address: SessionServerAddress | None = None
        self._manager: SessionManager | None = None

    async def start(self, setup: NodeSetup, host: str) -> SessionServerAddress:
        """Serve sessions at `host`, a free port; where it does so already, this only says where.

        Raises `AdapterError` for another setup than it was started with, and what keeps a server from starting.
        """
        others = [each.name for each in fields(setup) if getattr(setup, each.name) != getattr(self._setup, each.name)]
        if others:
            raise AdapterError(f"an earlier controller has started it with another {', another '.join(others)}")
        if self._address is None:
            async with AsyncExitStack() as stack:
                await self._open(stack, host)
                self._stack = stack.pop_all()
        assert self._address is not None
        return self._address

    async def run(self, task: AgentTask) -> tuple[Rollout, tuple[Sample, ...]]:
        """The rollout of `task` without its samples, and these."""
        rollout = await self._require_manager().run(task)
        return replace(rollout, samples=()), rollout.samples

    def mark(self, keep: Keep) -> None:
        """The step of `SessionManager.abort_hooks` of this name; so are the next three."""
        self._require_manager().abort_hooks().mark(keep)

    async def ask_agents(self) -> None:
        """Ask the agents to stop."""
        ask = self._require_manager().abort_hooks().abort
        assert ask is not None
        await ask()

    async def stop_agents(self, seconds: float) -> list[str]:
        """End the agents that still run; the sessions of those that are left even then."""
        return await self._require_manager().stop_agents(seconds)

    def clear(self) -> None:
        """The abort is over."""
        self._require_manager().abort_hooks().clear()

    async def stop(self) -> None:
        """End agents and server. Idempotent."""
        stack, self._stack, self._address, self._manager = self._stack, AsyncExitStack(), None, None
        await stack.aclose()

    async def _open(self, stack: AsyncExitStack, host: str) -> Self:
        setup = self._setup
        tokenizer = open_chat_tokenizer(Path(setup.tokenizer))
        script = None if setup.script is None else Path(setup.script)
        engine = open_engine(setup.engine, tokenizer=tokenizer.tokenizer, script=script)
        settings = ServerSettings(host=host, port=0, admin_token=setup.admin_token)
        server = await stack.enter_async_context(serve(engine, tokenizer, open_store(setup.store), settings))
        address = SessionServerAddress(server.url, setup.admin_token)
        manager = SessionManager(address.url, admin_token=address.admin_token)
        self._manager = await stack.enter_async_context(manager)
        self._address = address
        return self

    def _require_manager(self) -> SessionManager:
        if self._manager is None:
            raise AdapterError("the node has not been started")
        return self._manager

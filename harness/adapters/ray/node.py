"""One node: a session server and its agents. Knows nothing of Ray. A lost node loses only its own sessions."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import NamedTuple

from harness.engines.connect import open_engine
from harness.errors import AdapterError, StoreError
from harness.machine.deadlines import read_end
from harness.machine.log import get_logger
from harness.rollouts.agents.task import AgentTask
from harness.rollouts.client.connections import SessionServerAddress
from harness.rollouts.control.abort_report import AgentHooks, Keep
from harness.rollouts.manager import SessionManager, set_aside
from harness.samples.rollout import Rollout
from harness.server.serving import serve
from harness.server.settings import ServerSettings
from harness.server.store.base import SessionStore
from harness.server.store.sqlite import SQLiteStore, open_store, read_rows
from harness.sessions.session import Session
from harness.sessions.session_config import Inheritance
from harness.tokens.model_family import open_chat_tokenizer
from harness.types import Sample

RAY_RECORD_LOST = "ray_record_lost"
ABORT_S = 600.0
"""Seconds until a node ends a lost controller's abort."""


_log = get_logger(__name__)


class LostLife(NamedTuple):
    """A rollout's session on a node that was lost."""

    store: Path
    session_id: str


@dataclass(frozen=True, slots=True)
class NodeSetup:
    engine: str
    """As for `harness serve --engine`; a scripted one is per node."""
    tokenizer: str
    """Folder of the model's tokenizer, on every node."""
    admin_token: str = field(repr=False)
    """Admin token of every node, also for later controllers."""
    store: str = "memory"
    """`memory`, or a file. `{node}` in its path stands for the node's id; if all nodes reach that path, the rollouts of
    a lost node continue from their records.
    """
    script: str | None = None
    """Script of the scripted engine."""


class _Serving(NamedTuple):
    stack: AsyncExitStack
    store: SessionStore
    address: SessionServerAddress
    manager: SessionManager


class RolloutNode:
    """A session server and a manager of rollouts."""

    def __init__(self, setup: NodeSetup) -> None:
        self._setup = setup
        self._starting: asyncio.Task[_Serving] | None = None
        self._aborts: dict[str, AgentHooks] = {}

    async def start(self, setup: NodeSetup, host: str) -> SessionServerAddress:
        """Serve sessions at `host` on a free port, once. Return the address.

        Controllers share one start, which survives them. Raises `AdapterError` for another setup.
        """
        others = [each.name for each in fields(setup) if getattr(setup, each.name) != getattr(self._setup, each.name)]
        if others:
            raise AdapterError(f"an earlier controller has started it with another {', another '.join(others)}")
        if self._starting is None or (self._starting.done() and self._serving is None):
            self._starting = asyncio.create_task(self._open(host), name="ray node: start")
            self._starting.add_done_callback(read_end)  # its caller may be gone
        return (await asyncio.shield(self._starting)).address

    async def run(self, task: AgentTask, lost: Sequence[LostLife] = ()) -> tuple[Rollout, tuple[Sample, ...]]:
        """Run `task`, from the record of its last `lost` life with one. Return the rollout, and its samples apart."""
        serving = self._require_serving()
        if lost:
            with suppress(OSError):  # then the agent finds what the lost life left
                await asyncio.to_thread(set_aside, task.workdir.absolute())  # on a disk that the nodes share
            task = await _adopt(task, lost, serving.store)
        rollout = await serving.manager.run(task)
        return replace(rollout, samples=()), rollout.samples

    async def mark(self, abort: str, keep: Keep) -> None:
        """Do this step of `SessionManager.abort_hooks`; so do the next three methods. Ends within `ABORT_S`."""
        self._aborts[abort] = hooks = self._require_serving().manager.abort_hooks()
        asyncio.get_running_loop().call_later(ABORT_S, self._clear, abort)
        hooks.mark(keep)

    async def ask_agents(self) -> None:
        ask = self._require_serving().manager.abort_hooks().abort
        assert ask is not None
        await ask()

    async def stop_agents(self, seconds: float) -> list[str]:
        """Kill agents. Return the sessions of survivors."""
        return await self._require_serving().manager.stop_agents(seconds)

    async def clear(self, abort: str) -> None:
        """End the abort with that id. Idempotent."""
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
            store = open_store(setup.store)
            server = await stack.enter_async_context(serve(engine, tokenizer, store, settings))
            manager = SessionManager(server.url, admin_token=setup.admin_token)
            await stack.enter_async_context(manager)
            return _Serving(stack.pop_all(), store, SessionServerAddress(server.url, setup.admin_token), manager)

    @property
    def _serving(self) -> _Serving | None:
        starting = self._starting
        if starting is None or not starting.done() or starting.cancelled() or starting.exception() is not None:
            return None
        return starting.result()

    def _require_serving(self) -> _Serving:
        if self._serving is None:
            raise AdapterError("the node has not been started")
        return self._serving


async def _adopt(task: AgentTask, lost: Sequence[LostLife], store: SessionStore) -> AgentTask:
    # Without a record, which only the disk of a lost node may have, the rollout begins as its task says.
    for life in reversed(lost):
        try:
            record = await _read_last_life(life.store, life.session_id)
            record.close()
            await store.create(record)
            await store.set_phase(record)
        except StoreError as error:
            _log.warning(RAY_RECORD_LOST, error=error.message)
            continue
        strict = task.inherits is not None and task.inherits.strict
        return replace(task, inherits=Inheritance(record.session_id, strict=strict))
    return task


async def _read_last_life(path: Path, session_id: str) -> Session:
    store = SQLiteStore(path)
    while (heir := await store.find_heir(session_id)) is not None:  # its manager resumed it before the node was lost
        session_id = heir
    session = (await store.read_record(session_id)).session
    if session.records_rows:
        session.put_rows(await asyncio.to_thread(read_rows, path, session_id))
    return session

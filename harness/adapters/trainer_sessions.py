"""A `SessionManager` in a trainer's loop. Everything opens with the first rollout, and works in its loop only."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Generic, NamedTuple, TypeVar

from harness._version import __version__
from harness.adapters.agents import Program
from harness.errors import AdapterError
from harness.machine.deadlines import read_end, to_the_end
from harness.rollouts.agents.programs import prepare_agent
from harness.rollouts.agents.task import ProgramAgent
from harness.rollouts.client.connections import SessionServerAddress
from harness.rollouts.client.session_server import SessionServerClient
from harness.rollouts.manager import SessionManager
from harness.sessions.session_config import MissingRowsPolicy, Recorded
from harness.token_rows import RoutedExperts
from harness.types import Json

ADMIN_TOKEN_VARIABLE = "HARNESS_ADMIN_TOKEN"  # noqa: S105  # the name of a variable
MODEL = "policy"
"""Model name for clients that need one."""

_ANSWER_S = 10.0

_Function = TypeVar("_Function")


class OpenSessions(NamedTuple, Generic[_Function]):
    manager: SessionManager
    agent: ProgramAgent | _Function


class TrainerSessions(Generic[_Function]):
    """One session server, of this version, and one agent, which `find_agent` finds. `env` overrides a program's.

    Sessions keep the rows in `record`.
    """

    router: RoutedExperts | None = None
    """Router of the model that the engine serves, once open."""

    def __init__(
        self,
        server: SessionServerAddress,
        find_agent: Callable[[], Program | _Function],
        env: Mapping[str, str],
        record: Sequence[Recorded] = (),
    ) -> None:
        self._server = server
        self._record = record
        self._find_agent = find_agent
        self._env = env
        self._opening: asyncio.Task[OpenSessions[_Function]] | None = None
        self._client: SessionServerClient | None = None

    async def open(self) -> OpenSessions[_Function]:
        """Return the manager and its agent, opened once and retried after a failure.

        Raises `SessionServerError` for a silent server, `AgentError` for a broken program, `AdapterError` for a missing
        agent, another version, or an engine without the rows to record.
        """
        if self._opening is None or (self._opening.done() and _has_failed(self._opening)):
            self._opening = asyncio.create_task(self._open(), name="adapter: open")
            self._opening.add_done_callback(read_end)  # its caller may be cancelled
        return await asyncio.shield(self._opening)

    async def close(self) -> None:
        """Close what was opened. Idempotent."""
        opening, client, self._opening, self._client = self._opening, self._client, None, None
        if opening is not None:
            await asyncio.wait({opening})
            if not _has_failed(opening):
                await opening.result().manager.__aexit__(None, None, None)
        if client is not None:
            await client.close()

    async def _open(self) -> OpenSessions[_Function]:
        if self._client is None:
            self._client = SessionServerClient(self._server)
        server = await self._client.describe(deadline_s=_ANSWER_S)
        if server.harness != __version__:
            raise AdapterError(f"{self._server.url} is of version {server.harness}, expected {__version__}")
        returned = {Recorded.ROUTED_EXPERTS: server.routed_experts, Recorded.SAMPLING_MASK: server.max_mask_ids}
        if missing := [each for each in self._record if not returned[each]]:
            raise AdapterError(f"{self._server.url}: its engine returns no {missing[0]}; see docs/replay.md")
        self.router = server.routed_experts
        found = self._find_agent()
        agent: ProgramAgent | _Function
        if isinstance(found, Path | tuple):
            program = await prepare_agent(found)
            agent = replace(program, env={**program.env, **self._env})
        else:
            agent = found
        manager = SessionManager(self._server.url, admin_token=self._server.admin_token, client=self._client)
        await manager.__aenter__()
        return OpenSessions(manager, agent)


def recording(record: Sequence[Recorded]) -> Json:
    """Return the fields of a session whose samples lack no row, since trainers cannot mask one."""
    return {"record": list(record), "missing_rows": MissingRowsPolicy.REQUIRE} if record else {}


@asynccontextmanager
async def rollout_directory(keep: Path | None, name: str) -> AsyncIterator[Path]:
    """Yield a directory for one rollout, below `keep` or temporary."""
    if keep is not None:
        yield keep / name
        return
    directory = TemporaryDirectory(prefix="harness-rollout-", ignore_cleanup_errors=True)
    try:
        yield Path(directory.name) / name
    finally:
        await to_the_end(asyncio.to_thread(directory.cleanup))  # an agent may leave a hundred thousand files


def _has_failed(task: asyncio.Task[object]) -> bool:
    return task.cancelled() or task.exception() is not None

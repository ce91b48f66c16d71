"""A `SessionManager` in a trainer's loop. Everything opens with the first rollout, and works in its loop only."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from harness._version import __version__
from harness.adapters.agents import Program
from harness.errors import AdapterError
from harness.machine.deadlines import read_end, to_the_end
from harness.rollouts.agents.programs import prepare_agent
from harness.rollouts.agents.task import AgentFunction, AgentTask, FunctionAgent, ProgramAgent
from harness.rollouts.client.connections import SessionServerAddress
from harness.rollouts.client.session_server import SessionServerClient
from harness.rollouts.manager import SessionManager
from harness.sessions.session_config import MissingRowsPolicy, Recorded
from harness.token_rows import RoutedExperts
from harness.types import Json, Message

ADMIN_TOKEN_VARIABLE = "HARNESS_ADMIN_TOKEN"  # noqa: S105  # the name of a variable
MODEL = "policy"
"""Model name for clients that need one."""

DEADLINE_S = 1800.0

_ANSWER_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """Server of a trainer's rollouts, and settings of their agents and sessions."""

    server: SessionServerAddress
    agent_env: tuple[tuple[str, str], ...] = ()
    """Added to a program's environment."""
    deadline_s: float = DEADLINE_S
    matching: tuple[str, ...] | None = None
    """None: from the agent's profile."""
    workdir: Path | None = None
    """Folder that keeps rollout directories; None deletes them."""
    resume_attempts: int = 0
    """See `AgentTask.resume_attempts`."""
    record: tuple[Recorded, ...] = ()
    """Rows of which no sample lacks one, since trainers cannot mask it."""

    def make_task(
        self,
        agent: ProgramAgent | FunctionAgent,
        prompt: str | Sequence[Message],
        workdir: Path,
        metadata: Json,
        *,
        sampling: Json,
        most_tokens: int | None,
        selection: str | None,
    ) -> AgentTask:
        """Make the task of one rollout. `most_tokens` limit the session's sequence, prompt included."""
        session: Json = {"sampling": sampling}
        if self.record:
            session |= {"record": list(self.record), "missing_rows": MissingRowsPolicy.REQUIRE}
        if most_tokens is not None:
            session["limits"] = {"tokens_per_session": most_tokens}
        if selection is not None:
            session["selection"] = str(selection)
        if self.matching is not None:
            session["matching"] = list(self.matching)
        return AgentTask(
            agent=agent,
            prompt=prompt,
            workdir=workdir,
            model=MODEL,
            deadline_s=self.deadline_s,
            session=session,
            metadata=metadata,
            resume_attempts=self.resume_attempts,
        )


class OpenSessions(NamedTuple):
    manager: SessionManager
    agent: ProgramAgent | AgentFunction


class TrainerSessions:
    """One session server, of this version, and one agent, which `find_agent` finds."""

    router: RoutedExperts | None = None
    """Router of the model that the engine serves, once open."""

    def __init__(self, settings: TrainerSettings, find_agent: Callable[[], Program | AgentFunction]) -> None:
        self._settings = settings
        self._find_agent = find_agent
        self._opening: asyncio.Task[OpenSessions] | None = None
        self._client: SessionServerClient | None = None

    async def open(self) -> OpenSessions:
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

    async def _open(self) -> OpenSessions:
        address = self._settings.server
        if self._client is None:
            self._client = SessionServerClient(address)
        server = await self._client.describe(deadline_s=_ANSWER_S)
        if server.harness != __version__:
            raise AdapterError(f"{address.url} is of version {server.harness}, expected {__version__}")
        returned = {Recorded.ROUTED_EXPERTS: server.routed_experts, Recorded.SAMPLING_MASK: server.max_mask_ids}
        if missing := [each for each in self._settings.record if not returned[each]]:
            raise AdapterError(f"{address.url}: its engine returns no {missing[0]}; see docs/replay.md")
        self.router = server.routed_experts
        found = self._find_agent()
        agent: ProgramAgent | AgentFunction
        if isinstance(found, Path | tuple):
            program = await prepare_agent(found)
            agent = replace(program, env={**program.env, **dict(self._settings.agent_env)})
        else:
            agent = found
        manager = SessionManager(address.url, admin_token=address.admin_token, client=self._client)
        await manager.__aenter__()
        return OpenSessions(manager, agent)


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

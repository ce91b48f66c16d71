"""Run against a running session server or router: `harness run SUITE --server URL`.

The server has other users, so the run touches only its own sessions, never the gate or an engine. Scenarios that need
more are refused at the start. Each session is noted before its creation, and its tokens are counted before its
deletion; if they cannot be counted, the session stays for the resumed run. Rollouts that a server restart failed run
again on resume.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from harness.errors import EngineUnavailable, ScenarioError, SessionExists, SessionServerError
from harness.rollouts.client.connections import SessionServerAddress
from harness.rollouts.client.session_server import (
    Collected,
    Deadlines,
    Futures,
    ServerDescription,
    SessionHandle,
    SessionServerClient,
)
from harness.rollouts.manager import SessionManager
from harness.samples.turn_rewards import TurnRewards
from harness.sessions.lifecycle import RolloutEnd
from harness.suite.record.attached_sessions import AttachedSessions
from harness.suite.record.config import differences
from harness.suite.run.services import Services
from harness.suite.scenarios.folder import ScenarioFolder
from harness.types import Json
from server_patch.repeat_terminate import RepeatTerminateConfig

_GREETING_S = 10.0
_UNKNOWN = "unknown"
"""Phase of a session that the server does not have."""


class AttachedChoice(NamedTuple):
    """A running server, and the required repeat guard."""

    url: str
    repeat_guard: RepeatTerminateConfig | None = None

    @classmethod
    def of(cls, folder: ScenarioFolder, url: str) -> "AttachedChoice":
        """Return the choice for `folder`; of `[engine]`, only the guard applies."""
        spec = folder.scenario.engine.repeat_guard
        return cls(url, spec.config if spec is not None and spec.enabled else None)

    @property
    def key(self) -> str:
        """Name in `lock.json`."""
        guard = "" if self.repeat_guard is None else f" repeat_guard={self.repeat_guard.digest()[:12]}"
        return f"server={self.url}{guard}"


class AttachedClient(SessionServerClient):
    """Client that notes sessions before creating them and counts their tokens before deleting them."""

    def __init__(
        self, address: SessionServerAddress, sessions: AttachedSessions, deadlines: Deadlines | None = None
    ) -> None:
        super().__init__(address, deadlines=deadlines)
        self._sessions = sessions
        self._is_draining = False

    async def create(self, body: Json, *, give_up: Futures = ()) -> SessionHandle:
        """See `SessionServerClient`. Raises `StoreError`."""
        shard = body["inherits"]["session_id"][:2] if "inherits" in body else secrets.token_hex(1)
        while True:
            session_id = shard + secrets.token_hex(15)
            self._sessions.note(session_id)
            try:
                session = await super().create({**body, "session_id": session_id}, give_up=give_up)
                break
            except SessionServerError as error:
                if error.was_refused or 400 <= error.status < 500:
                    self._sessions.forget(session_id)
                # `SessionExists`: a drain closed the session during creation, and the client retried with the same id.
                if error.code != SessionExists.code:
                    raise  # unless it was a refusal, the session may exist: it stays noted
        if self._is_draining:
            await self.drain(session.session_id)
        return session

    async def collect(self, session_id: str, *, turn_rewards: TurnRewards | None = None) -> Collected:
        """See `SessionServerClient`. Counts the session's tokens."""
        collected = await super().collect(session_id, turn_rewards=turn_rewards)
        if collected.facts.phase != _UNKNOWN:
            self._sessions.keep(session_id, collected.session)
        return collected

    async def delete(self, session_id: str, end: RolloutEnd | None = None) -> None:
        """See `SessionServerClient`. A session that cannot be counted in time stays."""
        if session_id in self._sessions.list_uncounted():
            try:
                async with asyncio.timeout(self.deadlines.delete_s):
                    await self.end(session_id, within_s=self.deadlines.delete_s / 2)
                    await self.collect(session_id)
            except TimeoutError:
                raise SessionServerError("its tokens could not be counted in time; --resume deletes it") from None
        await super().delete(session_id, end)

    async def drain_own(self) -> None:
        """Drain this run's sessions, even those being created."""
        self._is_draining = True
        answers = await asyncio.gather(*map(self.drain, self._sessions.list_uncounted()), return_exceptions=True)
        errors = [each for each in answers if isinstance(each, BaseException)]
        if errors:
            raise errors[0]

    async def delete_abandoned_sessions(self) -> int:
        """Count and delete an earlier process's sessions. Returns how many the server lost."""
        missing = 0
        for session_id in self._sessions.list_uncounted():
            await self.end(session_id, within_s=self.deadlines.delete_s)
            if (await self.collect(session_id)).facts.phase == _UNKNOWN:
                self._sessions.give_up(session_id)
                missing += 1
            await super().delete(session_id)
        return missing


@dataclass(frozen=True, slots=True)
class AttachedServices(Services):
    """A shared session server, whose engine this run does not control."""

    client: AttachedClient
    say: Callable[[str], None]

    def open_manager(self) -> SessionManager:
        return SessionManager(self.address.url, admin_token=self.address.admin_token, client=self.client)

    async def drain(self) -> None:
        """See `Services`; other users' sessions continue."""
        await self.client.drain_own()

    async def close_abandoned_sessions(self) -> None:
        missing = await self.client.delete_abandoned_sessions()
        if missing:
            self.say(f"{missing} sessions of the run before are not on the server: what they sampled is not known")

    async def start_of_server(self) -> str:
        """See `Services`. Raises `EngineUnavailable` when it serves something else."""
        described = await self.client.describe(deadline_s=self.client.deadlines.read_s)
        changes = list(differences(self.identity, described.serves))
        if changes:
            raise EngineUnavailable(f"{self.address.url} serves something else now: {'; '.join(changes)}")
        return described.start


@asynccontextmanager
async def attach(
    choice: AttachedChoice,
    admin_token: str | None,
    database: Path,
    say: Callable[[str], None],
    deadlines: Deadlines | None = None,
) -> AsyncIterator[AttachedServices]:
    """Yield the server as services; counts go to `database`. Raises `SessionServerError` or `ScenarioError`."""
    address = SessionServerAddress(choice.url, admin_token)
    deadlines = deadlines or Deadlines()
    with AttachedSessions(database) as sessions:
        async with AttachedClient(address, sessions, deadlines) as client:
            described = await _describe(client, min(_GREETING_S, deadlines.read_s))
            identity = described.serves
            _require_guard(choice, identity)
            say(f"running on {choice.url}: {identity['engine']} with {identity['model']}")
            yield AttachedServices(address, identity["model"], identity, described.engines, None, client, say)


async def _describe(client: SessionServerClient, deadline_s: float) -> ServerDescription:
    named = f"--server {client.address.url}"
    try:
        return await client.describe(deadline_s=deadline_s)
    except SessionServerError as error:
        if error.status == 401:
            given = "another one was given" if client.address.admin_token else "none was given"
            raise ScenarioError(
                f"{named}: expected the server's admin token in --admin-token or HARNESS_ADMIN_TOKEN, {given}"
            ) from error
        if 400 <= error.status < 500 or error.code == "invalid_answer":
            raise ScenarioError(
                f"{named}: expected `harness serve` or `harness router` of this version, got {error.message}"
            ) from error
        raise SessionServerError(f"{named} cannot be used: {error.message}", status=error.status) from error


def _require_guard(choice: AttachedChoice, identity: Json) -> None:
    wanted = choice.repeat_guard
    if wanted is not None and identity["repeat_guard"] != wanted.digest():
        has = identity["repeat_guard"]
        raise ScenarioError(
            f"--server {choice.url}: the scenario wants the repeat guard {wanted.digest()[:12]}, the server's engine"
            f" runs {'none' if has is None else str(has)[:12]}; start it with that guard, or drop engine.repeat_guard"
        )

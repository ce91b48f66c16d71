"""A session server or router that runs already, as the services of a suite: `harness run SUITE --server URL`.

It has other users. So the run asks for nothing but its own sessions, by their ids: it neither shuts the gate, nor
touches an engine, nor ends or deletes a session that it did not create. Scenarios that need more are refused before
anything begins.

The run keeps its books over HTTP. Every session is noted in the run's database before it is created, and is never
deleted before the tokens it has sampled were counted; where the server cannot be asked for them, the session stays
there, and the resumed run counts and deletes it. A server that is restarted meanwhile costs the rollouts that it
failed: they run again on resume.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from harness.client.connections import SessionServerAddress
from harness.client.session_server import (
    Collected,
    Deadlines,
    Futures,
    ServerDescription,
    SessionHandle,
    SessionServerClient,
)
from harness.errors import EngineUnavailable, ScenarioError, SessionExists, SessionServerError
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
"""The phase of a session that its server does not have."""


class AttachedChoice(NamedTuple):
    """A server that runs already, and the repeat guard that a scenario wants there."""

    url: str
    repeat_guard: RepeatTerminateConfig | None = None

    @classmethod
    def of(cls, folder: ScenarioFolder, url: str) -> "AttachedChoice":
        """The server at `url` for `folder`; nothing else of the scenario's `[engine]` counts."""
        spec = folder.scenario.engine.repeat_guard
        return cls(url, spec.config if spec is not None and spec.enabled else None)

    @property
    def key(self) -> str:
        """The name of the choice in `lock.json`."""
        guard = "" if self.repeat_guard is None else f" repeat_guard={self.repeat_guard.digest()[:12]}"
        return f"server={self.url}{guard}"


class AttachedClient(SessionServerClient):
    """A client that keeps the run's books: notes each session that it creates, and counts before it deletes."""

    def __init__(
        self, address: SessionServerAddress, sessions: AttachedSessions, deadlines: Deadlines | None = None
    ) -> None:
        super().__init__(address, deadlines=deadlines)
        self._sessions = sessions
        self._is_draining = False

    async def create(self, body: Json, *, give_up: Futures = ()) -> SessionHandle:
        """See `SessionServerClient`. Raises `StoreError` when the session cannot be noted."""
        while True:
            session_id = secrets.token_hex(16)
            self._sessions.note(session_id)
            try:
                session = await super().create({**body, "session_id": session_id}, give_up=give_up)
                break
            except SessionServerError as error:
                if error.was_refused or 400 <= error.status < 500:
                    self._sessions.forget(session_id)
                # A drain closed the session while it was created, and the client asked again with the same id.
                if error.code != SessionExists.code:
                    raise  # of an error that is no refusal nobody knows whether there is a session now
        if self._is_draining:
            await self.drain(session.session_id)
        return session

    async def collect(self, session_id: str, *, turn_rewards: TurnRewards | None = None) -> Collected:
        """See `SessionServerClient`; the tokens of the session are counted."""
        collected = await super().collect(session_id, turn_rewards=turn_rewards)
        if collected.facts.phase != _UNKNOWN:
            self._sessions.keep(session_id, collected.session)
        return collected

    async def delete(self, session_id: str, end: RolloutEnd | None = None) -> None:
        """See `SessionServerClient`; a session whose tokens cannot be counted in that time stays on the server."""
        if session_id in self._sessions.list_uncounted():
            try:
                async with asyncio.timeout(self.deadlines.delete_s):
                    await self.end(session_id, within_s=self.deadlines.delete_s / 2)
                    await self.collect(session_id)
            except TimeoutError:
                raise SessionServerError("its tokens could not be counted in time; --resume deletes it") from None
        await super().delete(session_id, end)

    async def drain_own(self) -> None:
        """Have no session of this run accept a further turn, those that are on their way included."""
        self._is_draining = True
        answers = await asyncio.gather(*map(self.drain, self._sessions.list_uncounted()), return_exceptions=True)
        errors = [each for each in answers if isinstance(each, BaseException)]
        if errors:
            raise errors[0]

    async def delete_abandoned_sessions(self) -> int:
        """Count and delete the sessions that are left from before; returns how many the server does not have.

        Nobody knows any more how much those had sampled: they count as empty.
        """
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
    """A session server that has other users, and an engine that this run knows nothing of."""

    client: AttachedClient
    say: Callable[[str], None]

    @property
    def tokenizer(self) -> None:
        """See `Services`; the server does not say."""

    def open_manager(self) -> SessionManager:
        """See `Services`."""
        return SessionManager(self.address.url, admin_token=self.address.admin_token, client=self.client)

    async def drain(self) -> None:
        """See `Services`; the sessions of others go on."""
        await self.client.drain_own()

    async def close_abandoned_sessions(self) -> None:
        """See `Services`."""
        missing = await self.client.delete_abandoned_sessions()
        if missing:
            self.say(f"{missing} sessions of the run before are not on the server: what they sampled is not known")

    async def start_of_server(self) -> str:
        """See `Services`. Raises `EngineUnavailable` when the server now serves something else."""
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
    """The server of `choice` as services, for the time of the block; the books are kept in `database`.

    Raises `SessionServerError` when it cannot be reached, and `ScenarioError` when it is none, wants another token, or
    does not run the repeat guard that is wanted.
    """
    address = SessionServerAddress(choice.url, admin_token)
    deadlines = deadlines or Deadlines()
    with AttachedSessions(database) as sessions:
        async with AttachedClient(address, sessions, deadlines) as client:
            described = await _describe(client, min(_GREETING_S, deadlines.read_s))
            identity = described.serves
            _require_guard(choice, identity)
            say(f"running on {choice.url}: {identity['engine']} with {identity['model']}")
            model = identity["model"]
            yield AttachedServices(address, model, identity, described.engines, client, say)


async def _describe(client: SessionServerClient, deadline_s: float) -> ServerDescription:
    """The server's own description, when it is one and lets us in."""
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

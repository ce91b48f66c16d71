"""Controllers that die: every step they take toward a session server or an engine may be their last.

A controller talks to the server under a path of its own (`/c0/sessions/pause`), so what it asks can be told from what
others ask. Once it is dead nothing of it arrives any more, as after `kill -9`.
"""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from harness.engines.base import OneWorker
from harness.errors import EngineUnavailable

_VERBS = re.compile(r"/sessions/(pause|drain|renew|resume)$")


class Death(StrEnum):
    """How a controller ends at its last step."""

    BEFORE = "killed before the step arrives"
    AFTER = "killed after the step, its answer lost"
    CANCELLED = "cancelled at the step, and cleaning up"


@dataclass
class Life:
    """What is left of a controller."""

    last_step: int | None
    """None: it lives on."""
    death: Death = Death.BEFORE
    end: Callable[[], Any] = lambda: None
    """Ends the controller itself: called at its last step."""
    is_dead: bool = False
    ttl_s: float = 0.0
    holds_until: float = 0.0
    """It has a hold on the gate until then, by what the server has answered; 0 when it released it."""
    steps: list[str] = field(default_factory=list)
    _has_ended: bool = False

    @property
    def is_mortal(self) -> bool:
        """It dies, if it comes so far."""
        return self.last_step is not None

    async def step(self, what: str, take: Callable[[], Awaitable[Any]]) -> Any:
        """Take a step; what a dead controller does has no effect and no answer: `_Dead`."""
        if self.is_dead:
            raise _Dead
        self.steps.append(what)
        if self._has_ended or self.last_step is None or len(self.steps) <= self.last_step:
            return await take()
        self._has_ended = True
        if self.death is Death.CANCELLED:
            self.end()
            return await take()
        self.is_dead = True
        try:
            if self.death is Death.AFTER:
                await take()
        finally:
            self.end()
        raise _Dead


class _Dead(Exception):
    """Nobody is there."""


class Mortality:
    """The session server's application, with the steps of controllers told apart by their path."""

    def __init__(self, app: ASGIApp, lives: list[Life], clock: Callable[[], float]) -> None:
        self._app = app
        self._clock = clock
        self._lives = lives

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        match = re.match(r"/c(\d+)(/.*)", scope.get("path", ""))
        if match is None:
            await self._app(scope, receive, send)
            return
        life, path = self._lives[int(match[1])], match[2]
        said: list[Message] = []

        async def keep(message: Message) -> None:
            said.append(message)

        async def take() -> None:
            await self._app({**scope, "path": path, "raw_path": path.encode()}, receive, keep)
            verb = _VERBS.search(path)
            if verb and said[0]["status"] == 200:
                life.holds_until = 0.0 if verb[1] == "resume" else self._clock() + life.ttl_s

        try:
            await life.step(path, take)
        except _Dead:
            said = [{"type": "http.response.start", "status": 500, "headers": []}, {"type": "http.response.body"}]
        for message in said:
            await send(message)


class MortalEngine:
    """An engine in the hands of a controller that may die."""

    def __init__(self, engine: Any, life: Life) -> None:
        self._engine = engine
        self._life = life

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def workers(self) -> OneWorker:
        """See `TokenProvider`; controlled through this one, not past it."""
        return OneWorker(self)  # type: ignore[arg-type]  # the rest of a provider is passed on

    async def pause(self, mode: Any) -> None:
        await self._step("pause", lambda: self._engine.pause(mode))

    async def resume(self) -> None:
        await self._step("resume", self._engine.resume)

    async def update_weights(self, path: Any, version: str) -> None:
        await self._step("update", lambda: self._engine.update_weights(path, version))

    async def abort(self, request_id: str | None) -> int:
        return await self._step("abort", lambda: self._engine.abort(request_id)) or 0

    async def _step(self, what: str, take: Callable[[], Awaitable[Any]]) -> Any:
        try:
            return await self._life.step(f"engine {what}", take)
        except _Dead:
            raise EngineUnavailable("nobody is there") from None

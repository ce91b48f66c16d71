"""A session server on loopback with a scripted engine, and a client that speaks to it as agents and owners do."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Self, TypeVar, cast

import httpx

from harness.engines.base import TokenProvider
from harness.engines.scripted import Script, ScriptedEngine, ScriptStep
from harness.machine.clock import Clock
from harness.server.app import SessionServer
from harness.server.serving import serve
from harness.server.settings import ServerSettings
from harness.server.store.base import SessionStore
from harness.server.store.sqlite import open_store
from harness.tokens.chat_tokenizer import ChatTokenizer
from harness.types import Json, Message
from tests.builders import toy_template, toy_tokenizer

PATIENCE_S = 30

E = TypeVar("E", bound=TokenProvider)
"""The engine that a test has behind its server."""


class SetClock:
    """A clock that stands still until somebody sets it."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class Served:
    """A session as its owner got it."""

    session_id: str
    base_url: str
    api_key: str


@dataclass(frozen=True, slots=True)
class Client(Generic[E]):
    """What agents and owners can ask a server."""

    http: httpx.AsyncClient
    engine: E
    server: SessionServer
    url: str
    restored: int

    async def create(self, **config: Any) -> Served:
        """A new session."""
        answer = await self.http.post("/sessions", json=config)
        assert answer.status_code == 200, answer.text
        return Served(**answer.json())

    async def chat(self, session: Served, messages: Sequence[Message], **fields: Any) -> httpx.Response:
        """A model call of the session's agent."""
        body = {"model": "m", "messages": list(messages), **fields}
        return await self.http.post(url_of(session), json=body, headers=bearer(session.api_key))

    async def say(self, session: Served, messages: Sequence[Message], **fields: Any) -> Message:
        """The message of a model call that must succeed."""
        answer = await self.chat(session, messages, **fields)
        assert answer.status_code == 200, answer.text
        message: Message = answer.json()["choices"][0]["message"]
        return message

    async def converse(self, session: Served, turns: int, history: Sequence[Message] = ()) -> list[Message]:
        """Take `turns` behind `history`; the history after them."""
        messages = list(history)
        for number in range(turns):
            messages.append({"role": "user", "content": f"question {number}"})
            messages.append(await self.say(session, messages))
        return messages

    async def record(self, session: Served) -> Json:
        """The session's record, with whole prompts."""
        answer = await self.http.get(f"/sessions/{session.session_id}?ids=prompts")
        assert answer.status_code == 200, answer.text
        record: Json = answer.json()
        return record

    async def samples(self, session: Served) -> list[Json]:
        """The session's samples."""
        samples: list[Json] = (await self.http.get(f"/sessions/{session.session_id}/samples")).json()["samples"]
        return samples

    async def gate(self) -> Json:
        """What `GET /sessions/gate` says."""
        report: Json = (await self.http.get("/sessions/gate")).json()
        return report

    async def turns_in_flight(self: "Client[ScriptedEngine]", count: int) -> None:
        """Return once that many turns are in flight, and their generations with them."""
        await eventually(lambda: len(self.engine.live) == count)

    async def sampling(self: "Client[ScriptedEngine]") -> None:
        """Return once the engine has sampled a token of a generation in flight."""
        await eventually(lambda: any(live.sampled for live in self.engine.live))

    async def held(self, count: int) -> None:
        """Return once that many requests wait at the gate."""
        await eventually(lambda: self.server.gatekeeper.held == count)


def bearer(credential: str | None) -> dict[str, str]:
    """How a client shows a key or a token; nothing when it has none."""
    return {} if credential is None else {"authorization": f"Bearer {credential}"}


def url_of(session: Served) -> str:
    """Where the session's agent sends chat completions."""
    return f"/sessions/{session.session_id}/v1/chat/completions"


async def eventually(holds: Callable[[], bool]) -> None:
    """Return once `holds()` is true; fail when that takes too long."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.002)


def says(*texts: str) -> tuple[ScriptStep, ...]:
    """Steps that say `texts`."""
    return tuple(ScriptStep(text=text) for text in texts)


@asynccontextmanager
async def serving(
    *steps: ScriptStep,
    store: Path | str = "memory",
    settings: ServerSettings | None = None,
    context_length: int = 1 << 20,
    clock: Clock = time.time,
) -> AsyncIterator[Client[ScriptedEngine]]:
    """A running server and a client for it."""
    script = Script(steps=steps or (ScriptStep(text="Understood."),))
    engine = ScriptedEngine(toy_tokenizer(), script, context_length=context_length)
    async with serving_with(engine, store=store, settings=settings, clock=clock) as client:
        yield client


@asynccontextmanager
async def serving_with(
    engine: E,
    *,
    store: Path | str | SessionStore = "memory",
    settings: ServerSettings | None = None,
    clock: Clock = time.time,
    chat_tokenizer: ChatTokenizer | None = None,
    patience_s: float = PATIENCE_S,
) -> AsyncIterator[Client[E]]:
    """The same in front of `engine`; its client is an operator."""
    token = None if settings is None else settings.admin_token
    kept = open_store(store, clock) if isinstance(store, Path | str) else store
    async with (
        serve(engine, chat_tokenizer or toy_template(), kept, settings, clock=clock) as running,
        httpx.AsyncClient(base_url=running.url, headers=bearer(token), timeout=patience_s) as http,
    ):
        yield Client(http, engine, running.server, running.url, running.restored)


@asynccontextmanager
async def session_on(*steps: ScriptStep, **how: Any) -> AsyncIterator[tuple[Client[ScriptedEngine], Served]]:
    """A running server with a client for it, and one session; `how` is that of `serving`."""
    async with serving(*steps, **how) as client:
        yield client, await client.create()


class RawClient:
    """One connection that speaks just enough HTTP: two hundred of them cost less than one httpx client."""

    def __init__(self, url: str) -> None:
        self._host, _, port = url.removeprefix("http://").partition(":")
        self._port = int(port)

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()

    def stop_reading(self) -> None:
        """Leave in the kernel what has not been read yet."""
        cast("asyncio.ReadTransport", self._writer.transport).pause_reading()

    def abort(self) -> None:
        """Close without another word: a reset when something was left unread."""
        self._writer.transport.abort()

    async def post(self, path: str, body: bytes = b"") -> tuple[int, Any]:
        """Status and decoded JSON of the answer."""
        head = f"POST {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        length = next(int(line.partition(":")[2]) for line in lines if line.startswith("content-length:"))
        return int(lines[0].split()[1]), json.loads(await self._reader.readexactly(length))

"""Session servers for the tests of the manager and of the agents: real ones, and one that only misbehaves."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from harness.engines.scripted import Script, ScriptedEngine, ScriptStep
from harness.server.serving import RunningServer, serve
from harness.server.settings import ServerSettings
from harness.server.store.base import MemoryStore, SessionStore
from tests.builders import toy_template


@asynccontextmanager
async def scripted_server(
    *steps: ScriptStep, settings: ServerSettings | None = None, store: SessionStore | None = None
) -> AsyncIterator[RunningServer]:
    """A session server whose model says `steps`, on the toy tokenizer."""
    chat_tokenizer = toy_template()
    engine = ScriptedEngine(chat_tokenizer.tokenizer, Script(steps) if steps else None)
    async with serve(engine, chat_tokenizer, store or MemoryStore(), settings) as server:
        yield server


HANG_UP = b"hang up"
"""Close the connection instead of answering."""
SAY_NOTHING = b"say nothing"
"""Keep the connection until the client closes it."""


class CannedServer:
    """Answers the n-th request with the n-th canned answer, the last one for ever."""

    def __init__(self, *answers: bytes) -> None:
        self._answers = answers
        self._connections: set[asyncio.Task[None] | None] = set()
        self.requests: list[str] = []
        """Method and path of what was asked."""
        self.url = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection with one request."""
        self._connections.add(asyncio.current_task())
        with suppress(asyncio.IncompleteReadError):  # a client that gives up before it has asked
            await self._answer(reader, writer)
        writer.close()
        await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.requests.append(head.partition(" HTTP")[0])
        answer = self._answers[min(len(self.requests), len(self._answers)) - 1]
        if answer is SAY_NOTHING:
            await reader.read()
        elif answer is not HANG_UP:
            writer.write(answer)

    async def finished(self) -> None:
        """Every connection has been served."""
        await asyncio.gather(*filter(None, self._connections))


@asynccontextmanager
async def canned_server(*answers: bytes) -> AsyncIterator[CannedServer]:
    """A `CannedServer` on loopback."""
    canned = CannedServer(*answers)
    async with await asyncio.start_server(canned.answer, "127.0.0.1", 0) as listener:
        canned.url = "http://{}:{}".format(*listener.sockets[0].getsockname())
        yield canned
        await canned.finished()


def http_answer(status: int, body: Any, *headers: str) -> bytes:
    """An HTTP answer with a JSON body, or with `body` itself when it is bytes."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(content)}", "connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


UNREADABLE = {
    "no UTF-8": http_answer(200, b'{"state": "\xff"}'),
    "nested without end": http_answer(200, b'{"later": ' * 100_000),
    "no gzip": http_answer(200, b"{}", "content-encoding: gzip"),
}
"""Answers that come whole and that nobody can decode."""

"""A relay between clients and a session server that counts what was asked, whatever the server thinks of it."""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self
from urllib.parse import urlsplit

_REQUEST = re.compile(rb"(?:GET|HEAD|POST|PUT|DELETE) /sessions/(\w+)\S* HTTP/1\.1\r\n")
_CHUNK = 1 << 16


class Witness:
    """Relays connections byte by byte."""

    def __init__(self, server_url: str) -> None:
        address = urlsplit(server_url)
        self._server = (address.hostname, address.port)
        self._relays: set[asyncio.Task[None]] = set()
        self.url = ""
        self.requests: Counter[str] = Counter()
        """Requests seen so far, by session."""

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection; when one side ends, so does the other."""
        task = asyncio.current_task()
        assert task is not None
        self._relays.add(task)
        server_reader, server_writer = await asyncio.open_connection(*self._server)
        ways = [self._carry(reader, server_writer, counts=True), self._carry(server_reader, writer, counts=False)]
        await asyncio.gather(*ways)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counts: bool) -> None:
        try:
            while chunk := await reader.read(_CHUNK):
                if counts:
                    self.requests.update(match.decode() for match in _REQUEST.findall(chunk))
                writer.write(chunk)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def finished(self) -> None:
        """Every connection has ended."""
        await asyncio.gather(*self._relays)

    @classmethod
    @asynccontextmanager
    async def of(cls, server_url: str) -> AsyncIterator[Self]:
        """A witness in front of the server at `server_url`; every client must have left by the end of the block."""
        witness = cls(server_url)
        async with await asyncio.start_server(witness.relay, "127.0.0.1", 0) as listener:
            witness.url = "http://{}:{}".format(*listener.sockets[0].getsockname())
            yield witness
            await witness.finished()

"""A client on the server's own loop that can hang up in the middle of a request, as sockets do."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette

from harness.machine.http_protocol import CONNECTION


@dataclass
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Exchange:
    """One request to an ASGI application, running as a task until it is answered."""

    app: Starlette
    method: str
    path: str
    content: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._inbox.put_nowait({"type": "http.request", "body": self.content, "more_body": False})
        self._status, self._head, self._body = 0, {}, b""
        self._has_left = False
        self.has_whole_answer = False
        """The last byte has arrived; the application may still be busy."""
        self.task = asyncio.ensure_future(self._run())

    def leave(self) -> None:
        """Hang up; whatever the server sends from now on is lost."""
        self._has_left = True
        self._inbox.put_nowait({"type": "http.disconnect"})
        self.task.get_loop().call_soon(self._tell_lost)  # as a loop hears of it, also when it stands still just now

    on_reset: Callable[[], None] | None = None
    """As a `Connection`, told by nobody: this client takes what it is sent, or has left."""

    on_lost: Callable[[], None] | None = None
    peer: None = field(default=None, init=False)

    @property
    def is_lost(self) -> bool:
        return self._has_left

    def is_closed_by_client(self) -> bool:
        return self._has_left

    def is_reset(self) -> bool:
        return self._has_left

    @property
    def is_over(self) -> bool:
        """The application has finished with the request."""
        return self.task.done()

    @property
    def answer(self) -> Answer | None:
        """The whole answer, when there is one and the client stayed for it."""
        if self._has_left or not self.has_whole_answer:
            return None
        return Answer(self._status, self._head, self._body)

    def _tell_lost(self) -> None:
        if self.on_lost is not None:
            self.on_lost()

    async def _run(self) -> None:
        path, _, query = self.path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in {"host": "server", **self.headers}.items()],
            "client": ("127.0.0.1", 1),
            "server": ("server", 80),
            "state": {CONNECTION: self},
        }
        await self.app(scope, self._inbox.get, self._send)

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._head = {name.decode().lower(): value.decode() for name, value in message["headers"]}
        else:
            self._body += message.get("body", b"")
            self.has_whole_answer |= not message.get("more_body", False)

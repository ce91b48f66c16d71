"""A process that answers for a `check.py`: one line in, one line out.

An answer counts when it is the only line that has come since the question, and carries the question's own id, which
nobody knew before. So what comes too late, twice or unasked is never the answer for another session. Whoever gets
`ScenarioError` from `ask`, or is cancelled in it, ends the process: it may still answer.
"""

import asyncio
import json
import secrets
import signal
import sys
from pathlib import Path
from typing import Any, Self, cast

from harness.errors import ScenarioError
from harness.machine.deadlines import within
from harness.machine.process_group import is_gone, reap, signal_group
from harness.types import Json

_RUNNER = Path(__file__).with_name("check_runner.py")
_MAX_ANSWER = 1 << 20
"""Bytes of an answer; a check that says more is ended."""
_MAX_ERROR = 500
"""Characters of a check's last words that are kept."""
_MAX_SHOWN = 60
"""Bytes of a wrong answer that are worth a reader's time."""
_END_TIMEOUT_S = 2.0  # a child that has left the group may hold a pipe open for ever
_POLL_S = 0.01


class CheckProcess:
    """A running check, of which one question at a time may be asked; its owner closes it."""

    def __init__(self, transport: asyncio.SubprocessTransport, pipes: "_Pipes") -> None:
        self._transport = transport
        self._pipes = pipes
        self._group = transport.get_pid()
        self._is_closed = False
        self.answered = 0
        """Questions that it has answered."""

    @classmethod
    async def start(cls, check: Path) -> Self:
        """A process for `check`, in a group of its own, which ends with this process."""
        command = (sys.executable, "-I", str(_RUNNER), str(check))
        loop = asyncio.get_running_loop()
        return cls(*await loop.subprocess_exec(_Pipes, *command, start_new_session=True))

    @property
    def is_ready(self) -> bool:
        """It can be asked: it runs, and has said nothing that no question asked for."""
        return self._transport.get_returncode() is None and not self._pipes.has_ended and not self._pipes.output

    async def ask(self, session: Json, result: Json | None, metadata: Json) -> Any:
        """The answer about one session, an object. Raises `ScenarioError` when there is none that counts."""
        question = {"id": secrets.token_hex(8), "session": session, "result": result, "metadata": metadata}
        pipe = cast("asyncio.WriteTransport", self._transport.get_pipe_transport(0))  # uvloop's is none by its type
        pipe.write(json.dumps(question).encode() + b"\n")
        await self._pipes.wait_for_line()
        line, end, rest = bytes(self._pipes.output).partition(b"\n")
        if not end and len(line) <= _MAX_ANSWER:
            await self.close()
            last_words = self._pipes.messages.decode(errors="replace").strip()[-_MAX_ERROR:]
            code = self._transport.get_returncode()
            raise ScenarioError(f"ended with code {code} and no score; {last_words}".rstrip("; "))
        try:
            answer = json.loads(line)
            json.dumps(answer, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ScenarioError(f"expected text, got a lone surrogate ({error})") from None
        except ValueError:
            answer = None
        if rest or not isinstance(answer, dict) or answer.get("id") != question["id"]:
            raise ScenarioError(f"expected one line as the answer, got {bytes(self._pipes.output[:_MAX_SHOWN])!r}")
        self._pipes.output.clear()
        self.answered += 1
        return answer

    async def close(self) -> None:
        """Kill the process and what it has started. Idempotent; interrupted, it has killed them too."""
        if self._is_closed:
            return
        self._is_closed = True
        signal_group(self._group, signal.SIGKILL)
        try:
            await within(_END_TIMEOUT_S, self._wait_until_gone())
        finally:
            self._transport.close()
            reap(self._group)

    async def _wait_until_gone(self) -> None:
        """A child that was killed closes its pipes a moment before the kernel calls it ended."""
        await self._pipes.closed.wait()
        while not is_gone(self._group):  # noqa: ASYNC110  # the kernel tells nobody
            await asyncio.sleep(_POLL_S)


class _Pipes(asyncio.SubprocessProtocol):
    """What a check has said; it is read whether somebody waits for it or not, or the check would stand still."""

    def __init__(self) -> None:
        self.output = bytearray()
        """Standard output since the last answer."""
        self.messages = bytearray()
        """The end of standard error."""
        self.has_ended = False
        """There will be no more output."""
        self.closed = asyncio.Event()
        self._news = asyncio.Event()

    async def wait_for_line(self) -> None:
        """Return when there is a line, more than a line may have, or no more to come."""
        while b"\n" not in self.output and len(self.output) <= _MAX_ANSWER and not self.has_ended:
            self._news.clear()
            await self._news.wait()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """See `asyncio.SubprocessProtocol`."""
        if fd == 1:
            self.output += data
            self._news.set()
        else:
            self.messages += data
            del self.messages[: -4 * _MAX_ERROR]  # characters have up to four bytes

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:  # noqa: ARG002  # asyncio's signature
        """See `asyncio.SubprocessProtocol`."""
        if fd == 1:
            self.has_ended = True
            self._news.set()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  # asyncio's signature
        """See `asyncio.SubprocessProtocol`."""
        self.has_ended = True
        self._news.set()
        self.closed.set()

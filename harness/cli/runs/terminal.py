"""A pseudo-terminal between the user's terminal and a program: keys (Ctrl+C), sizes and output pass."""

import asyncio
import os
import signal
import sys
import termios
import tty
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

from harness.errors import ScenarioError

_PIECE = 65_536


@asynccontextmanager
async def open_terminal() -> AsyncIterator[Path]:
    """Yield the path of a pseudo-terminal that shows on the user's. Raises `ScenarioError` if there is none."""
    if not sys.stdin.isatty():
        raise ScenarioError("--interactive: expected a terminal on standard input; leave the option out")
    with ExitStack() as restored:
        # Opened again: this one must not block, and the descriptors of the standard streams must.
        user = os.open(os.ttyname(sys.stdin.fileno()), os.O_RDWR | os.O_NOCTTY)
        restored.callback(os.close, user)
        ours, programs = os.openpty()
        restored.callback(os.close, ours)
        program_end = restored.enter_context(os.fdopen(programs, "rb", buffering=0))
        loop = asyncio.get_running_loop()
        termios.tcsetwinsize(ours, termios.tcgetwinsize(user))
        loop.add_signal_handler(signal.SIGWINCH, lambda: termios.tcsetwinsize(ours, termios.tcgetwinsize(user)))
        restored.callback(loop.remove_signal_handler, signal.SIGWINCH)
        restored.callback(termios.tcsetattr, user, termios.TCSADRAIN, termios.tcgetattr(user))
        path = Path(os.ttyname(programs))
        tty.setraw(user)
        async with asyncio.TaskGroup() as copies:
            keys = copies.create_task(_copy(user, ours))
            shown = copies.create_task(_copy(ours, user))
            try:
                yield path
            finally:
                # After its last holder the other end reads what is left, then an error.
                program_end.close()
                keys.cancel()
                with suppress(TimeoutError):
                    await asyncio.wait_for(shown, 1)


async def _copy(source: int, target: int) -> None:
    loop = asyncio.get_running_loop()
    # Transports own and close their descriptors.
    reader = asyncio.StreamReader()
    incoming, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(source), "rb", buffering=0)
    )
    outgoing, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, os.fdopen(os.dup(target), "wb", buffering=0)
    )
    writer = asyncio.StreamWriter(outgoing, protocol, None, loop)
    try:
        with suppress(OSError):  # EIO: no process holds the other end
            while data := await reader.read(_PIECE):
                writer.write(data)
                await writer.drain()
    finally:
        incoming.close()
        outgoing.close()

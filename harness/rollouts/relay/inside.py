"""The sandbox's end of a relay: `python3 FILE --socket PATH --port PORT -- COMMAND...`.

Listens on 127.0.0.1:PORT while COMMAND runs, and ends with its exit code. Runs on Python 3.8 and its standard library,
without `harness`: imports are relative for that reason.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys

from .carrier import BEGIN, GREETING, ID_BYTES, KNOWN, RESUME, Carrier, SocketStream, join
from .link import STREAMS, MalformedFrame

CANNOT_LISTEN = 125
"""Exit codes of a client that cannot run the command, as shells and `env` have them."""
CANNOT_EXECUTE = 126
NOT_FOUND = 127

_GREETING_S = 10.0
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 1.0
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> None:
    """Run the command line, and exit."""
    parser = argparse.ArgumentParser(prog="relay", description="Run COMMAND with a way to its session server.")
    parser.add_argument("--socket", required=True, help="unix socket of the relay")
    parser.add_argument("--port", type=int, required=True, help="port of 127.0.0.1 to listen on")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND...")
    given = parser.parse_args()
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not command:
        parser.error("expected `-- COMMAND...`, got no command")
    sys.exit(asyncio.run(relay(given.socket, given.port, command)))


async def relay(path: str, port: int, command: list[str]) -> int:
    """Run `command` while the listener runs. Return the exit code."""
    connector, places = Connector(path), asyncio.Semaphore(STREAMS)
    tasks: set[asyncio.Future[None]] = set()

    async def serve(client: SocketStream) -> None:
        async with places:
            await join(client, connector.carrier.open())

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(serve(SocketStream(reader, writer)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    try:
        listener = await asyncio.start_server(accept, "127.0.0.1", port)
    except OSError as error:
        return _complain(f"expected to listen on 127.0.0.1:{port}, got {error}; name a free port", CANNOT_LISTEN)
    connecting = asyncio.ensure_future(connector.keep_connected())
    try:
        return await run_command(command)
    finally:
        listener.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # the relay learns that they have left
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)


class Connector:
    """The one connection to the relay, made again whenever it breaks."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._begin()

    def _begin(self) -> None:
        self.carrier, self._link_id, self._verb = Carrier(), os.urandom(ID_BYTES), BEGIN

    async def keep_connected(self) -> None:
        """Connect until cancelled. Agents see a break only if the relay has given up their streams."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                if await self._carry_once():
                    pause_s = _FIRST_PAUSE_S
                else:
                    self._begin_anew()
            except MalformedFrame:
                self._begin_anew()
            except (OSError, EOFError):
                pass  # no relay, or none yet
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _carry_once(self) -> bool:
        reader, writer = await asyncio.open_unix_connection(self._path)
        deadline = asyncio.get_running_loop().call_later(_GREETING_S, writer.transport.abort)
        try:
            writer.write(GREETING + self._verb + self._link_id)
            is_known = await reader.readexactly(1) == KNOWN
            deadline.cancel()
            if is_known:
                self._verb = RESUME
                await self.carrier.carry(reader, writer)
            return is_known
        finally:
            deadline.cancel()
            writer.transport.abort()

    def _begin_anew(self) -> None:
        self.carrier.close()
        self._begin()


async def run_command(command: list[str]) -> int:
    """Run `command` to its end, pass signals on, and return its exit code, or 128 and its signal."""
    try:
        process = await asyncio.create_subprocess_exec(*command)
    except FileNotFoundError as error:
        return _complain(str(error), NOT_FOUND)
    except OSError as error:
        return _complain(str(error), CANNOT_EXECUTE)

    def pass_on(number: signal.Signals) -> None:
        # A terminal has sent its Ctrl+C to the command already.
        if process.returncode is None and not (number == signal.SIGINT and os.isatty(0)):
            process.send_signal(number)

    for number in _PASSED_ON:
        asyncio.get_running_loop().add_signal_handler(number, pass_on, number)
    code = await process.wait()
    return 128 - code if code < 0 else code


def _complain(message: str, code: int) -> int:
    sys.stderr.write(f"relay: {message}\n")
    return code

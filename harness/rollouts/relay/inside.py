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

from .byte_streams import SocketStream, join

CANNOT_LISTEN = 125
"""Exit codes of a client that cannot run the command, as shells and `env` have them."""
CANNOT_EXECUTE = 126
NOT_FOUND = 127

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
    """Run `command` beside the listener. Return the exit code."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = SocketStream(reader, writer)
        try:
            server = SocketStream(*await asyncio.open_unix_connection(path))
        except OSError:
            client.reset()
        else:
            await join(client, server)

    try:
        listener = await asyncio.start_server(carry, "127.0.0.1", port)
    except OSError as error:
        return _complain(f"expected to listen on 127.0.0.1:{port}, got {error}; name a free port", CANNOT_LISTEN)
    try:
        return await run_command(command)
    finally:
        listener.close()


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

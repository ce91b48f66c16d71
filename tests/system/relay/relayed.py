"""A session behind a relay, and the client of it as a sandbox runs it."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from harness.engines.scripted import ScriptedEngine, ScriptStep
from harness.rollouts.client.session_server import SessionHandle
from harness.rollouts.relay.outside import Relay, client_program, open_relay
from tests.session_servers.served import Client, Served, serving


def handle_of(session: Served) -> SessionHandle:
    """The session as the manager has it."""
    return SessionHandle(session.session_id, session.base_url, session.api_key)


@asynccontextmanager
async def relayed(
    folder: Path, *steps: ScriptStep, **how: Any
) -> AsyncIterator[tuple[Client[ScriptedEngine], Served, Relay, Path]]:
    """A running server, one session, and a relay to it; `how` is that of `serving`."""
    async with serving(*steps, **how) as client:
        session, path = await client.create(), folder / "relay.sock"
        async with open_relay(handle_of(session), path) as relay:
            yield client, session, relay, path


@asynccontextmanager
async def inside_process(
    folder: Path, path: Path, port: int, command: Sequence[str], *options: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The client, in a process that knows nothing of the harness; it is killed when the block ends."""
    program = folder / "relay.pyz"
    program.write_bytes(client_program())
    words = (sys.executable, "-I", "-S", str(program), "--socket", str(path), "--port", str(port), *options)
    process = await asyncio.create_subprocess_exec(
        *words, "--", *command, cwd="/", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def speak(path: Path, *pieces: bytes) -> bytes:
    """What comes back on a connection of its own to the relay's socket until it ends."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    for piece in pieces:
        writer.write(piece)
    answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    return answer


def request(method: str, target: str, *lines: str, body: bytes = b"") -> bytes:
    """A request as an agent sends it."""
    length = [f"content-length: {len(body)}"] if body else []
    return (
        "\r\n".join([f"{method} {target} HTTP/1.1", *(lines or ["host: localhost"]), *length, "", ""]).encode() + body
    )


def chat(text: str = "hi", **fields: Any) -> bytes:
    """The body of a model call."""
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}], **fields}).encode()

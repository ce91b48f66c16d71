"""A server that hangs up as a process does that is killed."""

import asyncio
import socket
from urllib.parse import urlsplit

import pytest

from harness.engines.scripted import ScriptStep
from tests.session_servers.scripted import scripted_server


@pytest.mark.parametrize("rounds", range(6))
async def test_nobody_is_left_on_the_line(rounds: int):
    """Whether a connection has begun, was accepted a moment ago, or still waits to be: it is reset."""
    loop = asyncio.get_running_loop()
    async with scripted_server(ScriptStep(text="Hello.")) as server:
        parts = urlsplit(server.url)
        clients = [socket.create_connection((parts.hostname, parts.port)) for _ in range(4)]
        for _ in range(rounds):
            await asyncio.sleep(0)
        server.hang_up()

        for client in clients:
            client.setblocking(False)
            with client, pytest.raises(ConnectionResetError):
                async with asyncio.timeout(60):
                    assert await loop.sock_recv(client, 1) is None

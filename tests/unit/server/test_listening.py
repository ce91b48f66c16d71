"""The socket that a server answers at."""

import asyncio
import socket

from harness.machine.asgi import listening


async def test_answers_are_not_held_back():
    """On the plain loop of a trainer, too: Nagle's algorithm is off for every connection."""
    accepted = asyncio.get_running_loop().create_future()

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    with listening("127.0.0.1", 0) as listener:
        async with await asyncio.start_server(answer, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            no_delay = await accepted
            writer.close()
            await writer.wait_closed()

    assert no_delay != 0

"""Ports for servers that a test starts later, or twice."""

import random
import socket
from contextlib import ExitStack, suppress


def free_ports(count: int = 1) -> int:
    """The first of `count` free ports. The system gives higher ones to whoever asks for any."""
    chance = random.SystemRandom()  # `random` is seeded anew for each test
    while True:
        first = chance.randrange(20_000, 32_000)
        with suppress(OSError), ExitStack() as stack:
            for number in range(count):
                stack.enter_context(socket.create_server(("127.0.0.1", first + number)))
            return first

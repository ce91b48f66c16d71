"""A server in a process of its own, and clients that mean harm to it."""

import asyncio
import re
import signal
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from harness.types import Json
from tests.harness_command import announced, start_harness, wait
from tests.session_servers.served import Served, bearer
from tests.system.abuse.hostile_requests import Ending, Hostile
from tests.toy_model import write_toy_model

PATIENCE_S = 60
SCRIPT = "[[steps]]\ntext = 'One.'\ntoken_delay_s = 0.001\n[[steps]]\ntext = 'Two and more.'\n"


@dataclass
class Host:
    """A server in a process of its own, and its operator."""

    pid: int
    address: tuple[str, int]
    http: httpx.AsyncClient
    token: str

    async def create(self, marker: str) -> Served:
        """A new session."""
        answer = await self.http.post("/sessions", json={"metadata": {"marker": marker}})
        assert answer.status_code == 200, answer.text
        return Served(**answer.json())

    async def read(self, path: str) -> Json:
        """What the operator reads there."""
        said: Json = (await self.http.get(path)).json()
        return said

    async def metrics(self) -> dict[str, float]:
        """By name, with labels."""
        lines = (await self.http.get("/metrics")).text.splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}

    async def held(self) -> Json:
        """All that requests may take and have to give back."""
        metrics, gate = await self.metrics(), await self.read("/sessions/gate")
        names = ("harness_turns_in_flight", "harness_heavy_work", "harness_heavy_work_bytes", "harness_sessions_open")
        return {
            **{name: metrics[name] for name in names},
            **{name: gate[name] for name in ("state", "held", "turns_in_flight", "sessions")},
        }

    def descriptors(self) -> int:
        """How many it has open."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))


@asynccontextmanager
async def serve(directory: Path) -> AsyncIterator[Host]:
    """`harness serve`, whose bounds of time are short."""
    (directory / "script.toml").write_text(SCRIPT)
    toy = write_toy_model(directory / "toy")
    limits = [word for limit in ("header_seconds=5", "body_seconds=5") for word in ("--limit", limit)]
    command = (
        "--engine",
        "scripted",
        "--script",
        directory / "script.toml",
        "--tokenizer",
        toy,
        "--write-timeout",
        "5",
    )
    process = start_harness("serve", *command, *limits, "--port", "0", "--json", log=directory / "serve.log")
    try:
        said = await asyncio.to_thread(announced, process)
        url, token = said["url"], said["admin_token"]
        host, _, port = url.removeprefix("http://").partition(":")
        async with httpx.AsyncClient(base_url=url, headers=bearer(token), timeout=PATIENCE_S) as http:
            yield Host(process.pid, (host, int(port)), http, token)
    finally:
        process.send_signal(signal.SIGTERM)
        ended = await asyncio.to_thread(wait, process)
    assert ended.code == 0


async def attack(host: Host, hostile: Hostile, done: asyncio.Event) -> bytes:
    """Everything that the server answers."""
    client = socket.socket()
    client.setblocking(False)
    if hostile.ending is Ending.NEVER_READ:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    loop = asyncio.get_running_loop()
    answer = b""
    try:
        await loop.sock_connect(client, host.address)
        with suppress(ConnectionError):
            sending = asyncio.create_task(send(client, hostile))
            match hostile.ending:
                case Ending.LEAVE:
                    await sending
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                case Ending.NEVER_READ:
                    await sending
                    await done.wait()
                case _:
                    async for piece in read(client):
                        answer += piece
            await sending
    finally:
        client.close()
    return answer


async def send(client: socket.socket, hostile: Hostile) -> None:
    """All pieces, as far as the server takes them."""
    loop = asyncio.get_running_loop()
    with suppress(ConnectionError):
        for piece in hostile.pieces:
            await loop.sock_sendall(client, piece)
            if len(hostile.pieces) > 1:
                await asyncio.sleep(0.001)
        if hostile.ending is Ending.HALF_CLOSE:
            client.shutdown(socket.SHUT_WR)


LAST_CHUNK = b"\r\n0\r\n\r\n"
WHOLE = re.compile(rb"content-length: (\d+)\r\n.*?\r\n\r\n", re.DOTALL | re.IGNORECASE)


async def read(client: socket.socket) -> AsyncIterator[bytes]:
    """Until the end of an answer, or of the connection."""
    loop = asyncio.get_running_loop()
    answer = b""
    while piece := await loop.sock_recv(client, 1 << 16):
        answer += piece
        yield piece
        whole = WHOLE.search(answer)
        if answer.endswith(LAST_CHUNK) or (whole and len(answer) >= whole.end() + int(whole[1])):
            return


async def besiege(host: Host, hostiles: Sequence[Hostile], *, at_a_time: int = 48) -> dict[str, bytes]:
    """The answers to `hostiles`, sent so many at a time; those that are never read stay open all the while."""
    places, done = asyncio.Semaphore(at_a_time), asyncio.Event()
    patient = [each for each in hostiles if each.ending is Ending.NEVER_READ]

    async def take_place(hostile: Hostile) -> bytes:
        async with places:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    return await attack(host, hostile, done)
            except TimeoutError as error:
                raise AssertionError(f"no end of an answer: {hostile.name}") from error

    never_read = [asyncio.create_task(attack(host, each, done)) for each in patient]
    others = [each for each in hostiles if each.ending is not Ending.NEVER_READ]
    answers = await asyncio.gather(*(take_place(each) for each in others))
    done.set()
    await asyncio.gather(*never_read)
    return {each.name: answer for each, answer in zip(others, answers, strict=True)}

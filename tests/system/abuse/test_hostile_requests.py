"""A server among clients that mean harm, and two that do not."""

import asyncio
import json
import re
import signal
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from harness.types import Json, Message
from tests.builders import user
from tests.harness_command import announced, start_harness, wait
from tests.session_servers.served import Served, bearer, url_of
from tests.system.abuse.hostile_requests import Ending, Hostile, Prey, hostile_requests
from tests.toy_model import write_toy_model

PATIENCE_S = 60
AT_A_TIME = 48
LEAST_TURNS = 10
SCRIPT = "[[steps]]\ntext = 'One.'\ntoken_delay_s = 0.001\n[[steps]]\ntext = 'Two and more.'\n"
PROMPTS = ("MARKER", "obey", "__globals__", "nobody")
TIMES = ("created_at", "seconds")


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
            "descriptors": len(list(Path(f"/proc/{self.pid}/fd").iterdir())),
        }


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


@dataclass
class Guest:
    """An agent that behaves."""

    session: Served
    marker: str
    stream: bool
    turns: int = 0
    messages: list[Message] = field(default_factory=list)

    async def talk(self, host: Host, *, until: asyncio.Event | None = None, turns: int = LEAST_TURNS) -> None:
        """Take `turns`, and go on `until` that happens."""
        async with httpx.AsyncClient(base_url=host.http.base_url, timeout=PATIENCE_S) as http:
            while self.turns < turns or (until is not None and not until.is_set()):
                self.messages.append(user(f"{self.marker} says {self.turns}"))
                body = {"messages": self.messages, "stream": self.stream}
                answer = await http.post(url_of(self.session), json=body, headers=bearer(self.session.api_key))
                assert answer.status_code == 200, answer.text
                self.messages.append({"role": "assistant", "content": self._said(answer)})
                self.turns += 1
                await asyncio.sleep(0.02)

    def _said(self, answer: httpx.Response) -> str:
        if not self.stream:
            content: str = answer.json()["choices"][0]["message"]["content"]
            return content
        parts = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        choices = [choice for part in parts for choice in json.loads(part)["choices"]]
        return "".join(choice["delta"].get("content") or "" for choice in choices)

    async def judge(self, host: Host) -> None:
        """Its record is that of a session that says the same words to a server that is left in peace."""
        twin = Guest(await host.create(self.marker), self.marker, self.stream)
        await twin.talk(host, turns=self.turns)
        assert self.messages == twin.messages
        records = [await host.read(f"/sessions/{each.session.session_id}?ids=prompts") for each in (self, twin)]
        for turn, other in zip(*map(comparable, records), strict=True):
            assert turn == other
        assert records[0]["ledger"] == records[1]["ledger"]
        await host.http.delete(f"/sessions/{twin.session.session_id}")


def comparable(record: Json) -> list[Json]:
    """Its turns, without what differs between any two sessions."""
    turns = [{name: value for name, value in turn.items() if name not in TIMES} for turn in record["turns"]]
    for turn in turns:
        turn["sampling"]["used"].pop("seed", None)
        for segment in turn["segments"]:
            del segment["request_id"]
    return turns


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


async def besiege(host: Host, hostiles: list[Hostile]) -> dict[str, bytes]:
    """The answers to `hostiles`, sent many at a time."""
    places, done = asyncio.Semaphore(AT_A_TIME), asyncio.Event()
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


async def test_clients_that_mean_harm_get_nothing_and_leave_nothing_behind(tmp_path: Path) -> None:
    """No 5xx, no word of another session, nothing that stays, and the record of those beside them is exact."""
    async with serve(tmp_path) as host:
        guests = [
            Guest(await host.create(f"MARKER-{name}"), f"MARKER-{name}", stream)
            for name, stream in (("ALPHA", False), ("BETA", True))
        ]
        own, gone = await host.create("own"), await host.create("gone")
        await host.http.delete(f"/sessions/{gone.session_id}")
        prey = Prey(own.session_id, own.api_key, guests[0].session.session_id, gone.api_key)
        before = await host.held()
        hostiles = list(hostile_requests(prey))
        assert len({each.name for each in hostiles}) == len({(*each.pieces, each.ending) for each in hostiles}) >= 300

        is_over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for guest in guests:
                group.create_task(guest.talk(host, until=is_over))
            answers = await besiege(host, hostiles)
            is_over.set()

        async with asyncio.timeout(PATIENCE_S):
            while (after := await host.held()) != before:
                await asyncio.sleep(0.1)
        assert after == before
        for guest in guests:
            await guest.judge(host)
        metrics = await host.metrics()

    judge(answers, [*(guest.marker for guest in guests), host.token, *(guest.session.api_key for guest in guests)])
    assert not [name for name in metrics if 'code="internal_error"' in name]
    log = (tmp_path / "serve.log").read_text()
    assert "Traceback" not in log
    assert "request_failed" not in log
    sessions = [own, gone, *(guest.session for guest in guests)]
    secrets = [host.token, *(each.api_key for each in sessions), *(each.session_id for each in sessions)]
    assert not [secret for secret in (*secrets, *PROMPTS) if secret in log]


def judge(answers: dict[str, bytes], secrets: list[str]) -> None:
    """Fail for whatever a hostile client was answered that it should not have been."""
    statuses: Counter[Any] = Counter()
    for name, answer in answers.items():
        found = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d\d\d) ", answer)]
        assert not [status for status in found if status >= 500], (name, answer[:400])
        assert not [secret for secret in secrets if secret.encode() in answer], (name, answer[:400])
        statuses.update(found)
    assert set(statuses) <= {100, 200, 400, 401, 404, 405, 408, 413, 429, 431}, statuses

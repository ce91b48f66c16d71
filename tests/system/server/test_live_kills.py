"""A server, a client or an engine that is killed in live streams: what an agent acts on was durable (I9).

`HARNESS_SOAK_KILLS` says how often each of them dies. The moments are counted in deltas that were read, not in seconds:
the first is right behind the first delta and the second behind an end, however busy the machine is; the others are
drawn over twice an answer's length.
"""

import asyncio
import json
import math
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from harness.engines.remote.sglang import SGLangTokenProvider
from tests.builders import toy_tokenizer
from tests.fake_engines.workers import worker_processes
from tests.free_ports import free_ports
from tests.session_servers.served import PATIENCE_S, serving_with
from tests.session_servers.store_file import ledger_of, read_file
from tests.system.server.test_crash import server_process

CLIENTS = 8
KILLS = int(os.environ.get("HARNESS_SOAK_KILLS", "4"))
LENGTH = "400"
"""Characters of an answer: several parts of a live stream."""
DELTAS = 16
"""About as many has such an answer."""


def moments(seed: int) -> Iterator[float]:
    """After how many deltas of a stream each kill comes; an end comes before the moments that it does not reach."""
    drawn = random.Random(seed)
    yield 1
    yield math.inf
    for _ in range(KILLS - 2):
        yield drawn.randint(1, 2 * DELTAS)


def says_end(event: dict) -> bool:
    """Whether an event of a stream says how the answer ended."""
    return "error" not in event and event["choices"][0]["finish_reason"] is not None


def said_in(event: dict) -> str:
    """The part of the answer that an event has."""
    return "" if "error" in event else event["choices"][0]["delta"].get("content") or ""


def events_in(seen: bytes) -> list[dict]:
    """The events of a stream, of its whole lines."""
    return [json.loads(line[6:]) for line in seen.split(b"\n")[:-1] if line.startswith(b"data: {")]


def has_end(seen: bytes) -> bool:
    """Whether whole lines of a stream say how the answer ended."""
    return any(says_end(event) for event in events_in(seen))


def is_cut(seen: bytes) -> bool:
    """Whether a stream has said something, and not how the answer ended."""
    return any(said_in(event) for event in events_in(seen)) and not has_end(seen)


async def lines_of(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Its lines as they come."""
    async for line in answer.aiter_lines():
        yield line.encode() + b"\n"


async def read_until(lines: AsyncIterator[bytes], deltas: float) -> bytes:
    """What a stream says up to its part number `deltas`, or to its end if that comes before."""
    seen, count = b"", 0
    async for line in lines:
        seen += line
        for event in events_in(line):
            count += bool(said_in(event))
            if count >= deltas or says_end(event):
                return seen
    return seen


@dataclass
class Reader:
    """Asks the same until it has the answer; remembers what it has seen each time."""

    session_id: str = ""
    turn: int = 0
    seen: list[str] = field(default_factory=list)
    """What has come of the answer, each time it was asked for."""
    answers: list[str] = field(default_factory=list)
    """Those that had an end."""
    deltas: int = 0
    """How many have come from this server."""

    async def read(self, url: str) -> None:
        """Ask for one answer after the other, until the server is gone."""
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False) as http:
            self.deltas = 0
            if not self.session_id:
                self.session_id = (await http.post("/sessions", json={"streaming": "live"})).json()["session_id"]
            while True:
                await self.ask(http)

    async def ask(self, http: httpx.AsyncClient) -> None:
        """Ask once, and read up to the end or until the server is gone."""
        body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": f"question {self.turn}"}]}
        self.seen.append("")
        url = f"/sessions/{self.session_id}/v1/chat/completions"
        async with http.stream("POST", url, json=body) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                self.seen[-1] += said_in(event)
                self.deltas += bool(said_in(event))
                if says_end(event):
                    self.answers.append(self.seen[-1])
                    self.turn += 1
                    self.seen = []
                    return


def answers_of(readers: list[Reader]) -> int:
    """How many have come with an end."""
    return sum(len(reader.answers) for reader in readers)


@pytest.mark.timeout(3600)
async def test_no_client_has_seen_an_end_whose_turn_is_not_in_the_store(tmp_path: Path):
    """Killed again and again; the same request gets an answer afterwards, and every token is accounted for."""
    store, readers, cut = tmp_path / "sessions.db", [Reader() for _ in range(CLIENTS)], 0
    for moment in moments(5):
        answered = answers_of(readers)
        async with server_process(store, LENGTH) as (process, url):
            reading = [asyncio.create_task(reader.read(url)) for reader in readers]
            async with asyncio.timeout(PATIENCE_S):
                while max(reader.deltas for reader in readers) < moment and not (
                    moment == math.inf and answers_of(readers) > answered
                ):
                    await asyncio.sleep(0.001)
            process.send_signal(signal.SIGKILL)
            endings = await asyncio.gather(*reading, return_exceptions=True)
        assert all(isinstance(ending, httpx.HTTPError) for ending in endings), endings
        cut += sum(bool(reader.seen and reader.seen[-1]) for reader in readers)
        file = read_file(store)
        for reader in readers:
            stored = [turn.reply["content"] for turn in file[reader.session_id].turns.values() if turn.is_usable]
            assert set(reader.answers) <= set(stored)

    assert cut > 0, "no stream was cut after it had said something"
    assert answers_of(readers) > 0, "no stream had an end"
    print(f"{KILLS} servers killed: {cut} streams cut, {answers_of(readers)} ended")
    async with server_process(store, LENGTH) as (_, url), httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
        for reader in readers:
            answered = len(reader.answers)
            await reader.ask(http)
            assert len(reader.answers) == answered + 1
        await every_token_is_accounted_for(http, store, [reader.session_id for reader in readers])


async def every_token_is_accounted_for(http: httpx.AsyncClient, store: Path, session_ids: list[str]) -> None:
    """In the ledger that the server has of each session, and in the rows of its file."""
    for session_id in session_ids:
        counted = (await http.get(f"/sessions/{session_id}")).json()["ledger"]
        assert counted["generated"] == counted["trained"] + counted["masked"] + sum(counted["dropped"].values())
        assert ledger_of(read_file(store)[session_id])["generated"] == counted["generated"]


CLIENT = """
import http.client, os, sys
host, port, path, body = sys.argv[1:]
connection = http.client.HTTPConnection(host, int(port))
connection.request("POST", path, body)
answer = connection.getresponse()
while line := answer.readline():
    os.write(1, line)
"""
"""Writes each line of an answer as it comes, so that what it has seen is known when it is dead."""


@pytest.mark.timeout(3600)
async def test_a_client_that_is_killed_has_seen_no_end_that_is_not_in_the_store(tmp_path: Path):
    """The same request gets an answer afterwards, and every token is accounted for."""
    store, session_ids, cut, ended = tmp_path / "sessions.db", [], 0, 0
    message = {"role": "user", "content": "question"}
    body = json.dumps({"model": "m", "stream": True, "messages": [message]})
    async with server_process(store, LENGTH) as (_, url), httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
        for moment in moments(6):
            session_id = (await http.post("/sessions", json={"streaming": "live"})).json()["session_id"]
            session_ids.append(session_id)
            path, parts = f"/sessions/{session_id}/v1/chat/completions", httpx.URL(url)
            command = (sys.executable, "-S", "-c", CLIENT, parts.host, str(parts.port), path, body)
            client = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            assert client.stdout is not None
            seen = await read_until(client.stdout, moment)
            with suppress(ProcessLookupError):
                client.kill()
            seen += await client.stdout.read()
            await client.wait()
            cut += is_cut(seen)
            ended += has_end(seen)
            usable = [turn for turn in read_file(store)[session_id].turns.values() if turn.is_usable]
            assert usable or not has_end(seen)

            again = await http.post(path, content=body)
            assert has_end(again.content), again.text
        assert cut > 0, "no stream was cut after it had said something"
        assert ended > 0, "no stream had an end"
        print(f"{KILLS} clients killed: {cut} streams cut, {ended} ended")
        await every_token_is_accounted_for(http, store, session_ids)


@pytest.mark.timeout(3600)
async def test_an_engine_that_is_killed_ends_no_stream_and_loses_no_token(tmp_path: Path):
    """Killed and started again on its port; the same request gets an answer, and every token is accounted for."""
    store, cut, ended = tmp_path / "sessions.db", 0, 0
    async with worker_processes() as workers:
        worker = await workers.start(port=free_ports(), token_delay_s=0.02)
        engine = SGLangTokenProvider(worker.url, vocab_size=toy_tokenizer().vocab_size)
        async with serving_with(engine, store=store) as client:
            http, session_ids = client.http, []
            for number, moment in enumerate(moments(7)):
                session_id = (await client.create(streaming="live")).session_id
                session_ids.append(session_id)
                path = f"/sessions/{session_id}/v1/chat/completions"
                asked = {"model": "m", "stream": True, "messages": [{"role": "user", "content": f"question {number}"}]}
                async with http.stream("POST", path, json=asked) as answer:
                    lines = lines_of(answer)
                    seen = await read_until(lines, moment)
                    await worker.kill()
                    seen += await read_until(lines, math.inf)
                cut += is_cut(seen)
                ended += has_end(seen)
                usable = [turn for turn in read_file(store)[session_id].turns.values() if turn.is_usable]
                assert usable or not has_end(seen)

                worker = await workers.start(port=worker.port, token_delay_s=0.02)
                async with asyncio.timeout(PATIENCE_S):
                    while not has_end((await http.post(path, json=asked)).content):
                        await asyncio.sleep(0.05)
            assert cut > 0, "no stream was cut after it had said something"
            assert ended > 0, "no stream had an end"
            print(f"{KILLS} engines killed: {cut} streams cut, {ended} ended")
            await every_token_is_accounted_for(http, store, session_ids)

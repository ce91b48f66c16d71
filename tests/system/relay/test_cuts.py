"""A link that is cut in random places: no turn is lost, and none is sampled twice (I5).

`HARNESS_SOAK_CUTS` says how often; each tool loop is cut four times.
"""

import asyncio
import os
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from harness.rollouts.relay.outside import open_relay
from tests.free_ports import free_ports
from tests.session_servers.served import Client, says, serving
from tests.system.relay.relayed import handle_of, inside_process

CUTS = int(os.environ.get("HARNESS_SOAK_CUTS", "20"))
CUTS_OF_A_LOOP = 4
LOOPS_AT_ONCE = 3
TURNS = 12
MOST_BYTES = 4_000
"""Carried by a connection before it is cut; a loop carries more than its cuts together."""

AGENT = """
import http.client, json, sys
port, path, key, turns = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
messages = [{"role": "user", "content": "begin " + "x" * 500}]
for turn in range(turns):
    body = {"model": "m", "messages": messages, "stream": turn % 2 == 1}
    client.request("POST", path + "/v1/chat/completions", json.dumps(body), {"authorization": "Bearer " + key})
    answer = client.getresponse()
    content = answer.read().decode()
    assert answer.status == 200, (answer.status, content)
    if body["stream"]:
        assert content.endswith("data: [DONE]\\n\\n"), content
        events = [json.loads(line[6:]) for line in content.split("\\n") if line.startswith("data: {")]
        said = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    else:
        said = json.loads(content)["choices"][0]["message"]["content"]
    assert said.startswith("answer %d " % turn), said
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "output %d " % turn + "y" * 500}]
"""
"""A tool loop that tolerates nothing: no other connection, no retry, no error."""


class Cutter:
    """A proxy of unix sockets that cuts its first connections after a random number of bytes."""

    def __init__(self, relay: Path, random_source: random.Random) -> None:
        self._relay = relay
        self._sizes = [random_source.randint(0, MOST_BYTES) for _ in range(CUTS_OF_A_LOOP)]
        self.cuts = 0

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection, up to its cut."""
        onward_reader, onward_writer = await asyncio.open_unix_connection(str(self._relay))
        left = self._sizes.pop() if self._sizes else None

        async def carry(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            nonlocal left
            while data := await source.read(1 << 16):
                target.write(data if left is None else data[:left])
                await target.drain()
                if left is not None:
                    left -= min(left, len(data))
                    if not left:
                        self.cuts += 1
                        return

        ways = [asyncio.create_task(carry(reader, onward_writer)), asyncio.create_task(carry(onward_reader, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for end in (writer, onward_writer):
                end.close()
                with suppress(OSError):
                    await end.wait_closed()


@asynccontextmanager
async def cutter(folder: Path, relay: Path, seed: int) -> AsyncIterator[tuple[Cutter, Path]]:
    """A proxy before `relay`, and its socket."""
    proxy, path = Cutter(relay, random.Random(seed)), folder / "cut.sock"
    server = await asyncio.start_unix_server(proxy.pass_on, path)
    try:
        yield proxy, path
    finally:
        server.close()


async def play_loop(client: Client, folder: Path, seed: int) -> int:
    """Play a tool loop, check what was recorded of it, and return how often it was cut."""
    folder.mkdir()
    session = await client.create(streaming="live" if seed % 2 else "recorded")
    async with (
        open_relay(handle_of(session), folder / "relay.sock"),
        cutter(folder, folder / "relay.sock", seed) as (proxy, path),
    ):
        port = free_ports()
        words = (str(port), f"/sessions/{session.session_id}", session.api_key, str(TURNS))
        async with inside_process(folder, path, port, [sys.executable, "-c", AGENT, *words]) as process:
            _, errors = await asyncio.wait_for(process.communicate(), 120)
    assert (process.returncode, errors.decode()) == (0, "")
    record = await client.record(session)
    assert [turn["status"] for turn in record["turns"]] == ["completed"] * TURNS
    assert len(await client.samples(session)) == 1
    ledger = record["ledger"]
    assert ledger["generated"] == ledger["trained"] + ledger["masked"] + sum(ledger["dropped"].values())
    assert ledger["generated"] == sum(len(turn["output_ids"]) for turn in record["turns"])
    assert not sum(ledger["dropped"].values())
    return proxy.cuts


@pytest.mark.timeout(3600)
async def test_no_turn_is_lost_or_sampled_twice(tmp_path: Path):
    """The agent repeats nothing, so every turn that the server has is one that it asked for."""
    texts = [f"answer {turn} " + "z" * 300 for turn in range(TURNS)]
    places = asyncio.Semaphore(LOOPS_AT_ONCE)
    async with serving(*says(*texts)) as client:

        async def play(seed: int) -> int:
            async with places:
                return await play_loop(client, tmp_path / str(seed), seed)

        cuts = await asyncio.gather(*(play(seed) for seed in range(-(-CUTS // CUTS_OF_A_LOOP))))
    assert sum(cuts) >= CUTS
    print(f"{sum(cuts)} cuts of {len(cuts)} tool loops of {TURNS} turns")

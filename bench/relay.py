"""What a turn costs more through the relay of a sandbox: `python -m bench.relay [--turns 100] [--rounds 5]`.

One agent process plays a tool loop on the scripted engine, by turns straight to the server and through the relay's
client. Prints medians of milliseconds a turn, and their difference.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from pathlib import Path

from harness.rollouts.relay.outside import open_relay
from tests.free_ports import free_ports
from tests.session_servers.served import Client, says, serving
from tests.system.relay.relayed import handle_of, inside_process

AGENT = """
import http.client, json, sys, time
port, path, key, turns = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
client = http.client.HTTPConnection("127.0.0.1", port)
messages, seconds = [{"role": "user", "content": "begin"}], []
for turn in range(turns):
    started = time.perf_counter()
    client.request("POST", path, json.dumps({"messages": messages}), {"authorization": "Bearer " + key})
    said = json.load(client.getresponse())["choices"][0]["message"]
    seconds.append(time.perf_counter() - started)
    messages += [said, {"role": "user", "content": "output"}]
print(json.dumps(seconds[turns // 10:]))
"""


async def play(client: Client, folder: Path, turns: int, *, relayed: bool) -> float:
    session = await client.create()
    words = (f"/sessions/{session.session_id}/v1/chat/completions", session.api_key, str(turns))
    if not relayed:
        port = client.url.rpartition(":")[2]
        command = (sys.executable, "-c", AGENT, port, *words)
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        output, _ = await process.communicate()
    else:
        socket, port = folder / "relay.sock", str(free_ports())
        command = (sys.executable, "-c", AGENT, port, *words)
        async with (
            open_relay(handle_of(session), socket),
            inside_process(folder, socket, int(port), command) as process,
        ):
            output, _ = await process.communicate()
    return 1_000 * statistics.median(json.loads(output))


async def main(turns: int, rounds: int) -> None:
    texts = [f"answer {turn}" for turn in range(turns)]
    direct, relayed = [], []
    with tempfile.TemporaryDirectory() as folder:
        async with serving(*says(*texts)) as client:
            for _ in range(rounds):
                direct.append(await play(client, Path(folder), turns, relayed=False))
                relayed.append(await play(client, Path(folder), turns, relayed=True))
    more = statistics.median(relayed) - statistics.median(direct)
    print(f"direct {statistics.median(direct):.2f} ms, relayed {statistics.median(relayed):.2f} ms: {more:.2f} ms more")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    asyncio.run(main(options.turns, options.rounds))

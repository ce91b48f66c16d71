"""What the session server adds to a turn, measured over real sockets against an engine that costs nothing.

    python bench/session_server.py [--json] [--turns 10]

Prints turns per second, added latency (p50, p99) and server memory for 1, 32 and 200 concurrent sessions, each beside a
bare ASGI server that parses the same requests and answers a constant: the ratio is what the harness costs on this
machine, today. Then the cost of turn 5 and of turn 200 of one session; their ratio shows that a turn's cost does not
grow with the session (I11). Servers are processes of their own; the load generator is this one.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import aiohttp
import psutil
import uvloop

THIS = Path(__file__).resolve()
ROOT = THIS.parent.parent
CONCURRENCY = (1, 32, 200)
ANSWER = "The answer to that is forty-two, as everybody knows."
QUESTION = "And what would you say about the following matter, number {}, which is of some length?"


@dataclass(frozen=True)
class Load:
    """Figures of one run of sessions against one server."""

    sessions: int
    turns_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_ms_per_turn: float
    rss_mib: float


async def run_server(role: str, directory: Path) -> None:
    """Body of a server process: prints its URL, runs until its standard input closes."""
    runner = _session_server if role == "harness" else _bare_server
    async with runner(directory) as url:
        print(url, flush=True)
        await asyncio.to_thread(sys.stdin.read)


@asynccontextmanager
async def _session_server(directory: Path) -> AsyncIterator[str]:
    from harness.engines.scripted import Script, ScriptedEngine, ScriptStep
    from harness.server.serving import serve
    from harness.store.connect import open_store
    from harness.telemetry.logging import configure_logging
    from harness.tokens.model_family import open_chat_tokenizer

    configure_logging("error")
    from tests.toy_model import write_toy_model

    chat_tokenizer = open_chat_tokenizer(write_toy_model(directory / "toy"))
    engine = ScriptedEngine(chat_tokenizer.tokenizer, Script((ScriptStep(text=ANSWER),)))
    async with serve(engine, chat_tokenizer, open_store(directory / "bench.db")) as running:
        yield running.url


@asynccontextmanager
async def _bare_server(directory: Path) -> AsyncIterator[str]:
    """Uvicorn and Starlette, a parsed request, a constant answer."""
    import socket

    import msgspec
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    del directory
    message = {"role": "assistant", "content": ANSWER}
    answer = msgspec.json.encode({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    async def create(request: Request) -> Response:
        return Response(msgspec.json.encode({"base_url": str(request.base_url) + "sessions/x"}))

    async def chat(request: Request) -> Response:
        msgspec.json.decode(await request.body())
        return Response(answer, media_type="application/json")

    routes = [Route("/sessions", create, methods=["POST"]), Route("/{path:path}", chat, methods=["POST"])]
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    server = uvicorn.Server(
        uvicorn.Config(Starlette(routes=routes), log_config=None, access_log=False, lifespan="off", http="httptools")
    )
    task = asyncio.create_task(server.serve(sockets=[listener]))
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    await task


@asynccontextmanager
async def server_process(role: str) -> AsyncIterator[tuple[str, psutil.Process]]:
    """A server of that role as a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        command = (sys.executable, str(THIS), "--serve", role, "--directory", directory)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            url = (await process.stdout.readline()).decode().strip()
            yield url, psutil.Process(process.pid)
        finally:
            process.stdin.close()
            await process.wait()


async def converse(client: aiohttp.ClientSession, url: str, turns: int, note: Callable[[int, float], None]) -> None:
    """One session of `turns` turns; `note(turn, seconds)` gets each turn's latency."""
    async with client.post(f"{url}/sessions", json={}) as response:
        base_url = json.loads(await response.read())["base_url"]
    messages: list[dict[str, object]] = []
    for turn in range(turns):
        messages.append({"role": "user", "content": QUESTION.format(turn)})
        body = json.dumps({"model": "m", "messages": messages}).encode()
        began = perf_counter()
        async with client.post(f"{base_url}/v1/chat/completions", data=body) as response:
            answer = await response.read()
        note(turn, perf_counter() - began)
        if response.status != 200:
            raise SystemExit(f"turn {turn} was answered {response.status}: {answer.decode()[:300]}")
        messages.append(json.loads(answer)["choices"][0]["message"])


async def measure_load(role: str, sessions: int, turns: int) -> Load:
    """`sessions` concurrent sessions of `turns` turns against a fresh server, after a short warm-up."""
    seconds: list[float] = []
    async with server_process(role) as (url, process), _client() as client:
        await converse(client, url, 20, lambda *_: None)
        cpu, began = _cpu(process), perf_counter()
        await asyncio.gather(*(converse(client, url, turns, lambda _, s: seconds.append(s)) for _ in range(sessions)))
        elapsed, used = perf_counter() - began, _cpu(process) - cpu
        rss = process.memory_info().rss / 2**20
    seconds.sort()
    return Load(
        sessions,
        len(seconds) / elapsed,
        statistics.median(seconds) * 1e3,
        seconds[int(len(seconds) * 0.99) - 1] * 1e3,
        used / len(seconds) * 1e3,
        rss,
    )


async def measure_growth(role: str, sessions: int = 5) -> tuple[float, float]:
    """Median milliseconds of turns 3..7 and of turns 198..202, one session at a time."""
    early: list[float] = []
    late: list[float] = []

    def note(turn: int, seconds: float) -> None:
        if 3 <= turn <= 7:
            early.append(seconds)
        elif 198 <= turn <= 202:
            late.append(seconds)

    async with server_process(role) as (url, _), _client() as client:
        for _ in range(sessions):
            await converse(client, url, 203, note)
    return statistics.median(early) * 1e3, statistics.median(late) * 1e3


def _client() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def measure(turns: int, *, quiet: bool) -> dict[str, object]:
    """All figures, printed as they come unless `quiet`."""
    report: dict[str, object] = {"turns_per_session": turns, "load": [], "growth": {}}
    say = (lambda _: None) if quiet else print
    say(f"{'':>10} {'sessions':>8} {'turns/s':>8} {'p50 ms':>8} {'p99 ms':>8} {'cpu ms/turn':>12} {'RSS MiB':>8}")
    for sessions in CONCURRENCY:
        count = turns if sessions > 1 else turns * 20
        bare, ours = [await measure_load(role, sessions, count) for role in ("bare", "harness")]
        for name, load in (("bare", bare), ("harness", ours)):
            say(
                f"{name:>10} {load.sessions:>8} {load.turns_per_s:>8.0f} {load.p50_ms:>8.2f} {load.p99_ms:>8.2f}"
                f" {load.cpu_ms_per_turn:>12.2f} {load.rss_mib:>8.0f}"
            )
        ratio = ours.cpu_ms_per_turn / bare.cpu_ms_per_turn
        added = ours.p50_ms - bare.p50_ms, ours.p99_ms - bare.p99_ms
        say(f"{'ratio':>10} CPU x{ratio:.2f}, added latency p50 {added[0]:.2f} ms, p99 {added[1]:.2f} ms")
        report["load"].append({"bare": vars(bare), "harness": vars(ours), "cpu_ratio": ratio})  # type: ignore[attr-defined]  # JSON edge
    for role in ("bare", "harness"):
        early, late = await measure_growth(role)
        say(f"{role:>10} turn 5: {early:.2f} ms, turn 200: {late:.2f} ms, ratio {late / early:.2f}")
        report["growth"][role] = {"turn_5_ms": early, "turn_200_ms": late, "ratio": late / early}  # type: ignore[index]  # JSON edge
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=10, help="turns per session under load")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.add_argument("--serve", choices=("harness", "bare"), help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        uvloop.run(run_server(options.serve, options.directory))
        return
    report = uvloop.run(measure(options.turns, quiet=options.json))
    if options.json:
        print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()

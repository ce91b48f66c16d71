"""A front and its shards as real processes, which tests kill and start again."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from harness.rollouts.client.connections import SessionServerAddress
from tests.free_ports import free_ports
from tests.processes.family import is_running
from tests.toy_model import write_toy_model

TOKEN = "the-token-of-the-operator"
START_S = 90


class ShardFleet:
    """`harness serve --shards` in `folder`; a context manager that leaves no process."""

    def __init__(self, folder: Path, *options: str, engine: str = "scripted", shards: int = 2) -> None:
        self.folder = folder / "shards"
        self.shards = shards
        self.url = ""
        self._options = (*options, "--engine", engine, "--tokenizer", str(write_toy_model(folder / "toy")))
        self._log = folder / "fleet.log"
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> "ShardFleet":
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    @property
    def address(self) -> SessionServerAddress:
        """Of the front."""
        return SessionServerAddress(self.url, TOKEN)

    @property
    def log(self) -> str:
        """What all processes have logged."""
        return self._log.read_text()

    def client(self, timeout_s: float = 30) -> httpx.AsyncClient:
        """An operator's, at the front."""
        return httpx.AsyncClient(base_url=self.url, headers={"authorization": f"Bearer {TOKEN}"}, timeout=timeout_s)

    async def start(self) -> None:
        """Start the front, on the port that it had; returns when it answers."""
        port = self.url.rpartition(":")[2] or str(free_ports(1 + self.shards))
        command = ("serve", "--shards", str(self.shards), "--store", str(self.folder), "--port", port, "--json")
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "harness", *command, *self._options),
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, "HARNESS_ADMIN_TOKEN": TOKEN},
                start_new_session=True,
            )
        assert self._process.stdout is not None
        async with asyncio.timeout(START_S):
            lines = [await self._process.stdout.readline()]
            while lines[-1] not in (b"}\n", b""):
                lines.append(await self._process.stdout.readline())
        said = json.loads(b"".join(lines) or b"{}")
        assert "url" in said, (said, self.log[-3000:])
        self.url = said["url"]

    async def kill_front(self) -> None:
        """SIGKILL; its shards are left to their watchdog."""
        assert self._process is not None
        self._process.kill()
        await self._process.wait()

    def kill_watchdog(self) -> None:
        """SIGKILL to the process that would end the shards of a dead front."""
        assert self._process is not None
        for child in psutil.Process(self._process.pid).children():
            if any("group_reaper" in word for word in child.cmdline()):
                child.kill()

    def kill_shard(self, number: int) -> None:
        """SIGKILL."""
        with suppress(ProcessLookupError):
            os.kill(self.shard_pids()[number], signal.SIGKILL)

    def shard_pids(self) -> list[int]:
        """The processes of the shards, as the front's record has them."""
        record = json.loads((self.folder / "shards.json").read_bytes())
        return [process["pid"] for process in record["processes"]]

    def stores(self) -> Sequence[Path]:
        """The files of the shards."""
        return [self.folder / f"shard-{number}.db" for number in range(self.shards)]

    async def stop(self, number: int = signal.SIGTERM) -> int:
        """End the front as its operator does, and everything with it; its exit code."""
        assert self._process is not None
        pids = self.shard_pids() if (self.folder / "shards.json").exists() else []
        if self._process.returncode is None:
            self._process.send_signal(number)
        async with asyncio.timeout(START_S):
            code = await self._process.wait()
            while any(is_running(pid) for pid in pids):
                await asyncio.sleep(0.02)
        return code

    async def serves(self) -> dict[str, Any]:
        """The report of the gate once every shard stands as the front does."""
        async with asyncio.timeout(START_S), self.client() as http:
            while True:
                with suppress(httpx.TransportError):
                    answer = await http.get("/sessions/gate")
                    if answer.status_code == 200 and not answer.json()["problems"]:
                        report: dict[str, Any] = answer.json()
                        return report
                await asyncio.sleep(0.05)

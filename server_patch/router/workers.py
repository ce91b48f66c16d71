"""The workers, as the gateway lists them, looked at again and again.

Workers are added and removed at the gateway (`POST /workers`, `DELETE /workers/<id>`). Workers that it was
started with count from the beginning, since it may take its time to list one, or never list a vLLM server; from the
moment it lists one, it decides about that one too.
The engine of a worker is found by asking the worker itself, by a route that only one of the engines has and that a
paused engine answers. While the gateway does not answer, its last list stands: workers do not vanish with it.

The gateway's own opinion of a worker's health is carried along and decides nothing here.
"""

import asyncio
import json
import logging
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from server_patch.router.verbs import Engine

log = logging.getLogger(f"harness.{__name__}")

_DEADLINE_S = 5.0
_ONLY_SGLANG = "/model_info"
_ONLY_VLLM = "/version"


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker of the gateway."""

    url: str
    """Without a trailing slash."""
    engine: Engine | None = None
    """None until it has answered once."""
    is_healthy: bool = True
    """In the gateway's opinion."""


class WorkerList:
    """The workers of the gateway at `gateway_url`, and those of `also` that it has never listed."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        gateway_url: str,
        also: Sequence[str] = (),
        to_workers: aiohttp.ClientSession | None = None,
    ) -> None:
        self._http = http
        self._to_workers = to_workers or http
        self._gateway_url = gateway_url
        self._never_listed = {url.rstrip("/") for url in also}
        self._workers: tuple[Worker, ...] = ()
        self._does_answer = True

    @property
    def current(self) -> tuple[Worker, ...]:
        """The workers as of the last look."""
        return self._workers

    async def follow(self, interval_s: float) -> None:
        """Look every `interval_s` seconds, until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            await self.look()

    async def look(self) -> bool:
        """Ask the gateway once; False when it did not answer, which changes nothing."""
        answer = await answer_of(self._http, f"{self._gateway_url}/workers")
        if not isinstance(answer, dict) or not isinstance(answer.get("workers"), list):
            self._say_whether_it_answers(does=False)
            return False
        self._say_whether_it_answers(does=True)
        listed = {worker.url: worker for worker in map(_worker, answer["workers"])}
        self._never_listed -= listed.keys()
        listed |= {url: Worker(url, is_healthy=False) for url in sorted(self._never_listed)}
        known = {worker.url: worker.engine for worker in self._workers}
        workers = (replace(worker, engine=known.get(url)) for url, worker in listed.items())
        self._say_what_changed(known.keys(), listed.keys())
        self._workers = tuple(await asyncio.gather(*map(self._with_engine, workers)))
        return True

    async def _with_engine(self, worker: Worker) -> Worker:
        if worker.engine is not None:
            return worker
        return replace(worker, engine=await engine_of(self._to_workers, worker.url))

    def _say_whether_it_answers(self, *, does: bool) -> None:
        if does != self._does_answer:
            self._does_answer = does
            event = "gateway_answers_again" if does else "gateway_does_not_list_workers"
            log.warning(event, extra={"gateway": self._gateway_url})

    def _say_what_changed(self, before: AbstractSet[str], after: AbstractSet[str]) -> None:
        for url in sorted(after - before):
            log.info("worker_listed", extra={"worker": url})
        for url in sorted(before - after):
            log.info("worker_unlisted", extra={"worker": url})


async def engine_of(http: aiohttp.ClientSession, url: str) -> Engine | None:
    """The engine that runs at `url`; None while it does not answer."""
    if await answer_of(http, url + _ONLY_SGLANG) is not None:
        return Engine.SGLANG
    return Engine.VLLM if await answer_of(http, url + _ONLY_VLLM) is not None else None


async def answer_of(http: aiohttp.ClientSession, url: str) -> Any:
    """The JSON of a successful GET; None when there was none in time."""
    try:
        async with asyncio.timeout(_DEADLINE_S), http.get(url) as answer:
            return json.loads(await answer.read()) if answer.ok else None
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return None


def _worker(listed: dict[str, Any]) -> Worker:
    url = str(listed.get("url", "")).rstrip("/").partition("@")[0]  # `@n` names a data-parallel rank
    return Worker(url, is_healthy=bool(listed.get("is_healthy", True)))

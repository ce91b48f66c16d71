"""Workers, polled from the gateway's list.

Workers that the gateway was started with count at once, since it may list one late, or a vLLM server never; once it
lists one, its list decides. If it does not answer, its last list stands.
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
# Routes that only one engine has, and that work while paused.
_ONLY_SGLANG = "/model_info"
_ONLY_VLLM = "/version"


@dataclass(frozen=True, slots=True)
class Worker:
    url: str
    engine: Engine | None = None
    """None until it has answered once."""
    is_healthy: bool = True
    """Health in the gateway's opinion; decides nothing here."""


class WorkerList:
    """Workers that the gateway lists, and workers of `also` that it never listed."""

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
        self.current: tuple[Worker, ...] = ()
        self._does_answer = True

    async def follow(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            await self.look()

    async def look(self) -> bool:
        """Read the list once. Return False, changing nothing, without an answer."""
        answer = await answer_of(self._http, f"{self._gateway_url}/workers")
        if not isinstance(answer, dict) or not isinstance(answer.get("workers"), list):
            self._say_whether_it_answers(does=False)
            return False
        self._say_whether_it_answers(does=True)
        listed = {worker.url: worker for worker in map(_worker, answer["workers"])}
        self._never_listed -= listed.keys()
        listed |= {url: Worker(url, is_healthy=False) for url in sorted(self._never_listed)}
        known = {worker.url: worker.engine for worker in self.current}
        workers = (replace(worker, engine=known.get(url)) for url, worker in listed.items())
        self._say_what_changed(known.keys(), listed.keys())
        self.current = tuple(await asyncio.gather(*map(self._with_engine, workers)))
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
    """Detect the engine at `url`, or None."""
    if await answer_of(http, url + _ONLY_SGLANG) is not None:
        return Engine.SGLANG
    return Engine.VLLM if await answer_of(http, url + _ONLY_VLLM) is not None else None


async def answer_of(http: aiohttp.ClientSession, url: str) -> Any:
    """GET JSON; None unless it succeeds in time."""
    try:
        async with asyncio.timeout(_DEADLINE_S), http.get(url) as answer:
            return json.loads(await answer.read()) if answer.ok else None
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return None


def _worker(listed: dict[str, Any]) -> Worker:
    url = str(listed.get("url", "")).rstrip("/").partition("@")[0]  # `@n` names a data-parallel rank
    return Worker(url, is_healthy=bool(listed.get("is_healthy", True)))

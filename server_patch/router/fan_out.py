"""Workers, polled from the gateway's list, and control verbs carried out at all of them at once.

Workers that the gateway was started with count at once, since it may list one late, or a vLLM server never; once it
lists one, its list decides. If it does not answer, its last list stands. Each worker has a deadline for a verb. Nothing
is retried or undone.
"""

import asyncio
import json
import logging
from collections import defaultdict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, field, replace
from time import monotonic
from typing import Any

import aiohttp

from server_patch.router.verbs import VERBS, Call, Engine, Plan, VerbError, VerbOrder, VerbResult, plan

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


_MISSING = frozenset({403, 404, 405})
_PAUSING = frozenset({"/pause_generation", "/continue_generation"})
_BODY_BYTES = 64 * 1024


@dataclass(slots=True)
class Updates:
    """Updates that pause their workers, by URL."""

    # One update at a time: a client that gave up on one and asks again would have it label the second one's weights
    # with the first one's version.
    locks: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    paused: set[str] = field(default_factory=set)
    """Workers paused only by an update, or since one failed."""


async def fan_out(
    http: aiohttp.ClientSession,
    workers: Sequence[Worker],
    order: VerbOrder,
    *,
    updates: Updates | None = None,
    deadline_s: float | None = None,
) -> list[VerbResult]:
    """Have every worker carry out `order`, within `deadline_s` each. `updates` is shared by all orders."""
    seconds = VERBS[order.verb].deadline_s if deadline_s is None else deadline_s
    known = updates or Updates()
    return await asyncio.gather(*(_tell(http, worker, order, known, seconds) for worker in workers))


def report(order: VerbOrder, results: Sequence[VerbResult]) -> dict[str, Any]:
    failed = [result.url for result in results if not result.succeeded]
    done = f"{len(results) - len(failed)} of {len(results)} workers carried out {order.verb}"
    return {
        "success": bool(results) and not failed,
        "message": done,
        "total": len(results),
        "succeeded": len(results) - len(failed),
        "failed": failed,
        "workers": [asdict(result) for result in results],
    }


def status_of(results: Sequence[VerbResult]) -> int:
    if not results:
        return 503
    successes = sum(result.succeeded for result in results)
    return 200 if successes == len(results) else 207 if successes else 502


class _Refused(Exception):
    """A worker said no."""


@dataclass(slots=True)
class _Errand:
    http: aiohttp.ClientSession
    url: str
    updates: Updates
    status: int | None = None
    body: Any = None

    async def carry_out(self, todo: Plan) -> None:
        if not todo.while_paused:
            await self._make(todo)
            return
        async with self.updates.locks[self.url]:
            await self._make_paused(todo)

    async def _make_paused(self, todo: Plan) -> None:
        # A worker that a client has paused stays paused.
        if self.url not in self.updates.paused and await self._is_paused():
            await self._make(todo)
            return
        self.updates.paused.add(self.url)
        await self._call(Call("POST", "/pause?mode=keep&clear_cache=true"))
        await self._make(todo)
        await self._call(Call("POST", "/resume"))
        self.updates.paused.discard(self.url)

    async def _make(self, todo: Plan) -> None:
        for call in todo.calls:
            await self._call(call)

    async def _is_paused(self) -> bool:
        await self._call(Call("GET", "/is_paused"))
        return isinstance(self.body, dict) and bool(self.body.get("is_paused"))

    async def _call(self, call: Call) -> None:
        await self._ask(call.method, call.target, call.body)
        if call.or_else and self.status in _MISSING:
            await self._ask(call.method, call.or_else, call.body)
        if self.status is None or not 200 <= self.status < 300 or _says_no(self.body):
            raise _Refused(f"{call.method} {call.target}: {self.status}")

    async def _ask(self, method: str, target: str, body: bytes) -> None:
        # A fresh connection: one that the server is closing would lose the call.
        headers = {"connection": "close"} | ({"content-type": "application/json"} if body else {})
        async with self.http.request(method, self.url + target, data=body or None, headers=headers) as answer:
            self.status = answer.status
            self.body = _decoded(await _beginning(answer.content))


async def _tell(
    http: aiohttp.ClientSession, worker: Worker, order: VerbOrder, updates: Updates, deadline_s: float
) -> VerbResult:
    errand = _Errand(http, worker.url, updates)
    if order.verb in _PAUSING:
        updates.paused.discard(worker.url)  # from now on the client decides when the worker continues
    began = monotonic()
    error = ""
    try:
        async with asyncio.timeout(deadline_s):
            await errand.carry_out(plan(order, worker.engine or Engine.SGLANG))
    except TimeoutError:
        error = f"no answer within {deadline_s:g} s"
    except (aiohttp.ClientError, OSError) as broken:
        error = f"cannot be reached: {type(broken).__name__} {broken}".rstrip()
    except (VerbError, _Refused) as refused:
        error = str(refused)
    seconds = round(monotonic() - began, 4)
    return VerbResult(worker.url, str(worker.engine or ""), not error, errand.status, errand.body, seconds, error)


async def _beginning(content: aiohttp.StreamReader) -> bytes:
    # Reads a whole body even if it arrives in pieces, but no more than this.
    try:
        return await content.readexactly(_BODY_BYTES)
    except asyncio.IncompleteReadError as ended:
        return ended.partial


def _says_no(body: Any) -> bool:
    # SGLang answers some failures with 200.
    return isinstance(body, dict) and body.get("success") is False


def _decoded(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return content.decode("utf-8", errors="replace")

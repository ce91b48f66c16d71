"""A control verb, carried out by every worker at once, and what became of it at each.

Every worker has its own deadline, and none waits for another: a worker that is dead, slow or refuses costs one line in
the report. Nothing is repeated and nothing is undone; whether half a success is enough is for the client to say.
Updates of a worker without a lock of its own come one after the other: a client that gave up on one and asks again
would have it label the weights of the second with the version of the first.
"""

import asyncio
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import Any

import aiohttp

from server_patch.router.verbs import VERBS, Call, Engine, Order, Plan, VerbError, plan
from server_patch.router.workers import Worker

_MISSING = frozenset({403, 404, 405})
_PAUSING = frozenset({"/pause_generation", "/continue_generation"})
_BODY_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class VerbResult:
    """The result of a verb at one worker."""

    url: str
    engine: str
    """`sglang`, `vllm`, or empty when the worker has never answered."""
    succeeded: bool
    status: int | None
    """HTTP status of the last answer; None when there was none."""
    body: Any
    """Of the last answer: decoded JSON, or text."""
    seconds: float
    error: str
    """Why there was no answer, or no success; empty otherwise."""


@dataclass(slots=True)
class Updates:
    """The updates of workers that must be paused for them, by URL."""

    locks: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    """Held while an update is carried out."""
    paused: set[str] = field(default_factory=set)
    """Paused by an update and by nobody else; those in which it failed stay so until one succeeds."""


async def fan_out(
    http: aiohttp.ClientSession,
    workers: Sequence[Worker],
    order: Order,
    *,
    updates: Updates | None = None,
    deadline_s: float | None = None,
) -> list[VerbResult]:
    """Have every worker carry out `order`; the results stand in the order of `workers`.

    `updates` are those of all orders to the same workers. `deadline_s` is the time of each worker; None takes that of
    the verb.
    """
    seconds = VERBS[order.verb].deadline_s if deadline_s is None else deadline_s
    known = updates or Updates()
    return await asyncio.gather(*(_tell(http, worker, order, known, seconds) for worker in workers))


def report(order: Order, results: Sequence[VerbResult]) -> dict[str, Any]:
    """The results as one JSON object; `success` and `message` as an SGLang server would say them."""
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
    """200 when every worker did, 207 when some did, 502 when none did, 503 when there is none."""
    if not results:
        return 503
    successes = sum(result.succeeded for result in results)
    return 200 if successes == len(results) else 207 if successes else 502


class _Refused(Exception):
    """A worker said no."""


@dataclass(slots=True)
class _Errand:
    """The calls to one worker, and its last answer."""

    http: aiohttp.ClientSession
    url: str
    updates: Updates
    status: int | None = None
    body: Any = None

    async def carry_out(self, todo: Plan) -> None:
        """Make the calls; the first one that fails raises."""
        if not todo.while_paused:
            await self._make(todo)
            return
        async with self.updates.locks[self.url]:
            await self._make_paused(todo)

    async def _make_paused(self, todo: Plan) -> None:
        """Make the calls at a worker that is paused meanwhile; one that somebody else has paused stays so."""
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
        # A connection of its own: one that the server is closing would lose the call.
        headers = {"connection": "close"} | ({"content-type": "application/json"} if body else {})
        async with self.http.request(method, self.url + target, data=body or None, headers=headers) as answer:
            self.status = answer.status
            self.body = _decoded(await _beginning(answer.content))


async def _tell(
    http: aiohttp.ClientSession, worker: Worker, order: Order, updates: Updates, deadline_s: float
) -> VerbResult:
    errand = _Errand(http, worker.url, updates)
    if order.verb in _PAUSING:
        updates.paused.discard(worker.url)  # from now on it is for the client to say when the worker goes on
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
    """All of a body, however many pieces it comes in; the first `_BODY_BYTES` of a longer one."""
    try:
        return await content.readexactly(_BODY_BYTES)
    except asyncio.IncompleteReadError as ended:
        return ended.partial


def _says_no(body: Any) -> bool:
    """SGLang answers some failures with 200 and `success: false`."""
    return isinstance(body, dict) and body.get("success") is False


def _decoded(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return content.decode("utf-8", errors="replace")

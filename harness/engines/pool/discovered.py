"""A pool that discovers its workers: it enters each one listed and leaves each one delisted.

    listed, not entered         enter it, self-test included; if refused, try again after a rest
    silent a few times          fence it: it serves no session, its requests may still end
    silent for long             leave it at once and fail its requests; enter it again when it answers; never during a
                                weight change, which explains the silence
    no longer listed            leave it after its last request

Probes never generate, so a paused engine passes them. The list itself is made elsewhere.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any, Self

from harness.engines.base import Capabilities, TokenProvider
from harness.engines.pool.pool import EnginePool
from harness.errors import EngineUnavailable, HarnessError
from harness.machine.log import get_logger
from harness.samples.versions import is_unsettled
from server_patch.background import running

log = get_logger(__name__)

_SILENT = "it does not answer"
_FENCED_AFTER = 3
_LEFT_AFTER = 12
_ENTER_S = 120.0
_OTHERS_S = 10.0  # sessions that begin before the second worker joins all go to the first
_LONGEST_REST_S = 30.0


@dataclass(frozen=True, slots=True)
class FoundWorker:
    name: str
    open: Callable[[], TokenProvider]


@dataclass(slots=True)
class _Refusal:
    reason: str
    times: int
    not_before: float


class DiscoveredPool(EnginePool):
    """Serves through the workers that `listed` returns.

    Args:
        listed: Returns the known workers, named by URL; called every `interval_s` seconds; must not block.
        interval_s: Also the probe interval.
        start_timeout_s: Longest wait for a first worker at entry.
        limit, queue_timeout_s: See `EnginePool`.
    """

    def __init__(
        self,
        listed: Callable[[], Sequence[FoundWorker]],
        *,
        interval_s: float = 1.0,
        start_timeout_s: float = 600.0,
        limit: int | None = None,
        queue_timeout_s: float = 600.0,
    ) -> None:
        super().__init__((), limit=limit, queue_timeout_s=queue_timeout_s)
        self._listed = listed
        self._interval_s = interval_s
        self._start_timeout_s = start_timeout_s
        self._entering: set[str] = set()
        self._refusals: dict[str, _Refusal] = {}
        self._silences: Counter[str] = Counter()
        self._stack = AsyncExitStack()

    @property
    def capabilities(self) -> Capabilities:
        """See `EnginePool`; `engine` is `router`, since workers of any kind come and go."""
        return replace(super().capabilities, engine="router")

    @property
    def refused(self) -> dict[str, str]:
        """Reasons why listed workers could not be entered, by name."""
        listed = {worker.name for worker in self._listed()}
        return {name: refusal.reason for name, refusal in self._refusals.items() if name in listed}

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.workers.leave_all)
            await stack.enter_async_context(running(self._follow()))
            await self._await_workers()
            self._stack = stack.pop_all()
        self.continues_at_entry = False  # a worker found paused later is paused on purpose
        return self

    async def __aexit__(self, *exit_of: Any) -> None:
        await self._stack.__aexit__(*exit_of)

    async def _await_workers(self) -> None:
        try:
            async with asyncio.timeout(self._start_timeout_s):
                while not self.workers:  # noqa: ASYNC110  # which of several events comes first does not matter here
                    await asyncio.sleep(self._interval_s / 10)
        except TimeoutError:
            reasons = "; ".join(f"{name}: {refusal.reason}" for name, refusal in self._refusals.items())
            raise EngineUnavailable(
                f"no worker was ready within {self._start_timeout_s:g} s ({reasons or 'none is listed'})"
            ) from None
        # The others get a little time to join the first.
        with suppress(TimeoutError):
            async with asyncio.timeout(_OTHERS_S):
                while self._entering:  # noqa: ASYNC110  # as above
                    await asyncio.sleep(self._interval_s / 10)

    async def _follow(self) -> None:
        async with asyncio.TaskGroup() as entering:
            while True:
                listed = {worker.name for worker in self._listed()}
                for status in self.workers:
                    if status.name not in listed:
                        await self.workers.retire(status.name, "no longer listed")
                now = asyncio.get_running_loop().time()
                resting = {name for name, refusal in self._refusals.items() if now < refusal.not_before}
                known = {status.name for status in self.workers} | self._entering | resting
                for worker in [each for each in self._listed() if each.name not in known]:
                    self._entering.add(worker.name)
                    entering.create_task(self._enter(worker))
                await self._judge_silences()
                await asyncio.sleep(self._interval_s)

    async def _enter(self, worker: FoundWorker) -> None:
        try:
            async with asyncio.timeout(_ENTER_S):
                await self._join(worker.name, worker.open())
            self._refusals.pop(worker.name, None)
            self._silences.pop(worker.name, None)
        except HarnessError as error:
            self._refuse(worker.name, error.message)
        except TimeoutError:
            self._refuse(worker.name, f"its self-test did not end within {_ENTER_S:g} s; is it paused?")
        finally:
            self._entering.discard(worker.name)

    def _refuse(self, name: str, reason: str) -> None:
        before = self._refusals.get(name)
        times = 1 if before is None else before.times + 1
        rest = min(_LONGEST_REST_S, self._interval_s * 2**times)
        self._refusals[name] = _Refusal(reason, times, asyncio.get_running_loop().time() + rest)
        if before is None or before.reason != reason:
            log.warning("worker_refused", worker=name, reason=reason)

    async def _judge_silences(self) -> None:
        for name, state in (await self.probe()).items():
            self._silences[name] = 0 if state.ready else self._silences[name] + 1
        for status in self.workers:
            name, silence = status.name, self._silences[status.name]
            if self.workers.may_be_silent or is_unsettled(self.workers.providers[name].weight_version):
                silence = self._silences[name] = min(silence, _FENCED_AFTER)
            if silence >= _LEFT_AFTER:
                await self.workers.retire(name, _SILENT, at_once=True)
            elif silence >= _FENCED_AFTER and not status.fence:
                self.workers.fence(name, _SILENT)
            elif silence == 0 and status.fence == _SILENT:
                self.workers.unfence(name)

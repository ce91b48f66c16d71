"""A pool whose workers are found: each that the list names is entered, each that it drops is left.

    listed, never seen          entered (its self-test included), then it serves; tried again after a while if refused
    listed, silent a few times  fenced: no session is served by it, its requests may still end
    silent for long             left at once, its requests fail; entered anew when it answers again; not while its
                                weights change, which is silence with a reason
    no longer listed            left when its last request has ended

Probes never ask an engine for a token, so a paused one passes them. The list and what runs at its URLs are not decided
here.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from harness.engines.base import Capabilities, ContinuesAtEntry, TokenProvider
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
_OTHERS_S = 10.0  # sessions that begin before the second worker is there all go to the first
_LONGEST_REST_S = 30.0


@dataclass(frozen=True, slots=True)
class FoundWorker:
    """A worker that a list names, and how to open it."""

    name: str
    """Its URL."""
    open: Callable[[], TokenProvider]


@dataclass(slots=True)
class _Refusal:
    """A worker that could not be entered."""

    reason: str
    times: int
    not_before: float


class DiscoveredPool(EnginePool):
    """Serves through the workers that `listed` names.

    Args:
        listed: The workers as they are known now; asked every `interval_s` seconds, must not block.
        interval_s: Also how often workers are probed.
        start_timeout_s: How long entering the pool waits for a first worker.
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
        self._continues_at_entry = False

    @property
    def capabilities(self) -> Capabilities:
        """See `EnginePool`; the engine is the router: workers of any kind come and go, and it serves the same."""
        return replace(super().capabilities, engine="router")

    @property
    def continues_at_entry(self) -> bool:
        """See `ContinuesAtEntry`; of the workers that are found while the pool is entered."""
        return self._continues_at_entry

    @continues_at_entry.setter
    def continues_at_entry(self, wanted: bool) -> None:
        self._continues_at_entry = wanted

    @property
    def refused(self) -> dict[str, str]:
        """Why listed workers could not be entered, by name; they are tried again."""
        listed = {worker.name for worker in self._listed()}
        return {name: refusal.reason for name, refusal in self._refusals.items() if name in listed}

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.workers.leave_all)
            await stack.enter_async_context(running(self._follow()))
            await self._await_workers()
            self._stack = stack.pop_all()
        self._continues_at_entry = False  # who is paused later is paused by somebody
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    async def _await_workers(self) -> None:
        """Return when a worker serves, and the others that are listed have had a little time to join it."""
        try:
            async with asyncio.timeout(self._start_timeout_s):
                while not self.workers:  # noqa: ASYNC110  # which of several events comes first does not matter here
                    await asyncio.sleep(self._interval_s / 10)
        except TimeoutError:
            reasons = "; ".join(f"{name}: {refusal.reason}" for name, refusal in self._refusals.items())
            raise EngineUnavailable(
                f"no worker could be entered within {self._start_timeout_s:g} s ({reasons or 'none is listed'})"
            ) from None
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
            provider = worker.open()
            if self._continues_at_entry and isinstance(provider, ContinuesAtEntry):
                provider.continues_at_entry = True
            async with asyncio.timeout(_ENTER_S):
                await self.workers.join(worker.name, provider)
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

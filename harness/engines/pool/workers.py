"""Members of a pool: workers join, are fenced, and leave while the pool serves.

A worker is entered, self-test included, before it serves, and left after its last request. All must have one
vocabulary, logprob scale and weights. A worker with older weights than another is fenced until it catches up, one with
an incomplete weight update even if it is alone. `discovered` finds workers.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from harness.engines.base import Capabilities, EngineWorkers, PauseMode, PoolObserver, TokenProvider, WorkerStatus
from harness.engines.pool.placement import Placement, WorkerLoad
from harness.errors import EngineUnavailable, ScenarioError, UnknownWeightVersion
from harness.machine.log import get_logger
from harness.samples.versions import LabelOrder, is_unsettled, is_version

log = get_logger(__name__)

MISSED_UPDATE = "it missed the update of its weights"
"""Fence of a worker with older weights than another."""

UNSETTLED = "an update of its weights is in progress or failed"
"""Fence of a worker with unknown weights."""


@dataclass(slots=True)
class _Member:
    provider: TokenProvider
    load: WorkerLoad
    stack: AsyncExitStack
    is_leaving: bool = False


class Workers:
    """`EngineWorkers` of a pool; iterates in order of joining.

    Args:
        placement: Learns which workers may be chosen.
        on_change: Called after a worker joined, left, or its fence changed.
    """

    def __init__(self, placement: Placement, on_change: Callable[[], None]) -> None:
        self._placement = placement
        self._on_change = on_change
        self.observer: PoolObserver | None = None
        self._is_held: Callable[[], bool] = lambda: False
        self.have_followed_scripts = False
        """True once one that follows scripts has joined."""
        self._members: dict[str, _Member] = {}
        self._entered: dict[WorkerLoad, _Member] = {}
        """Includes leaving ones."""
        self.order = LabelOrder()
        """Decides which of two labels is newer."""
        self._paused: PauseMode | None = None
        self._last: TokenProvider | None = None

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[WorkerStatus]:
        # A snapshot: workers may join or leave while the caller iterates.
        statuses = []
        for member in self._members.values():
            load, label = member.load, member.provider.weight_version
            statuses.append(WorkerStatus(load.name, label, load.fence, load.in_flight, load.sessions))
        return iter(statuses)

    @property
    def providers(self) -> dict[str, TokenProvider]:
        return {name: member.provider for name, member in self._members.items()}

    @property
    def known(self) -> dict[str, TokenProvider]:
        """Workers that define the capabilities: all, or the last that left."""
        return self.providers or ({} if self._last is None else {"": self._last})

    @property
    def is_paused(self) -> bool:
        """True if paused through the pool and not resumed since."""
        return self._paused is not None

    @property
    def may_be_silent(self) -> bool:
        """True if workers may be loading weights."""
        return self.is_paused or self._is_held()

    @property
    def serving(self) -> dict[str, TokenProvider]:
        return {name: member.provider for name, member in self._members.items() if not member.load.fence}

    def next_for(self, session_id: str) -> str | None:
        load = self._placement.next_for(session_id, asyncio.get_running_loop().time())
        return None if load is None else load.name

    def provider_of(self, load: WorkerLoad) -> TokenProvider:
        # It may be leaving.
        return self._entered[load].provider

    def count_labels_by(self, order: LabelOrder) -> None:
        self.order = order

    def observe(self, observer: PoolObserver) -> None:
        self.observer = observer
        self._tell_change()

    def excuse_silence(self, while_held: Callable[[], bool]) -> None:
        self._is_held = while_held

    def _tell_change(self) -> None:
        if self.observer is not None:
            self.observer.workers_serving(len(self.serving))
        self._on_change()

    def expect_pause(self, mode: PauseMode | None) -> None:
        """Record a pause of the workers, or a resume (None), for those that join."""
        self._paused = mode

    async def join(self, name: str, worker: TokenProvider) -> None:
        """Enter `worker` as `name`, paused if the pool is. Raises `ScenarioError` for another model."""
        if name in self._members:
            raise ScenarioError(f"the pool has a worker {name} already")
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(worker)
            _require_alike([provider.capabilities for provider in (*self.providers.values(), worker)])
            mode = None
            while mode is not self._paused:  # the pool may pause or resume during the await
                mode = self._paused
                await (worker.resume() if mode is None else worker.pause(mode))
            member = _Member(worker, self._placement.join(name), stack.pop_all())
            self._members[name] = self._entered[member.load] = member
            self.have_followed_scripts |= worker.capabilities.follows_scripts
        log.info("worker_joined", worker=name, weight_version=worker.weight_version)
        self.judge_weights()
        self._tell_change()

    async def retire(self, name: str, reason: str, *, at_once: bool = False) -> None:
        """Stop sending to the worker; leave it after its last request, or `at_once`."""
        member = self._members.pop(name)
        member.is_leaving = True
        if not self._members:
            self._last = member.provider
        self._placement.leave(name)
        log.info("worker_retired", worker=name, reason=reason, in_flight=member.load.in_flight)
        self._tell_change()
        if at_once:
            await member.stack.aclose()
        await self.let_go(member.load)

    async def let_go(self, load: WorkerLoad) -> None:
        """Leave the worker if retired and idle."""
        member = self._entered.get(load)
        if member is not None and member.is_leaving and not load.in_flight:
            del self._entered[load]
            await member.stack.aclose()

    async def let_idle_go(self) -> None:
        for load in list(self._entered):
            await self.let_go(load)

    async def leave_all(self) -> None:
        """Leave every worker, even busy ones."""
        async with AsyncExitStack() as stack:
            for name in list(self._members):
                self._placement.leave(name)
                stack.push_async_exit(self._members.pop(name).stack)

    def fence(self, name: str, reason: str) -> None:
        self._members[name].load.fence = reason
        log.warning("worker_fenced", worker=name, reason=reason)
        self._tell_change()

    def unfence(self, name: str) -> None:
        member = self._members[name]
        member.load.fence = self._objection(member)
        self._tell_change()

    def judge_weights(self) -> None:
        """Fence workers with old or unsettled weights; unfence the others."""
        for name, member in self._members.items():
            objection = self._objection(member)
            # Fences for other reasons belong to the caller who set them.
            if member.load.fence not in ("", MISSED_UPDATE, UNSETTLED) or objection == member.load.fence:
                continue
            if objection:
                self.fence(name, objection)
            else:
                self.unfence(name)

    def _objection(self, member: _Member) -> str:
        label = member.provider.weight_version
        if is_unsettled(label):
            return UNSETTLED
        newest = max(self.recency(provider.weight_version) for provider in self.providers.values())
        return MISSED_UPDATE if self.recency(label) < newest else ""

    def recency(self, label: str) -> int:
        """Return the policy version of a label, assigned if new; -1 if it is none."""
        try:
            return self.order.see(label)
        except UnknownWeightVersion:
            return -1

    def oldest(self, labels: Iterable[str]) -> str:
        return min(labels, key=self.recency, default="")


def fence_left_behind(workers: EngineWorkers, version: int) -> None:
    """Fence workers without `version`; unfence those with it that an update had fenced. Other fences stay."""
    for worker in workers:
        has_it = is_version(worker.weight_version, version)
        if has_it and worker.fence in (MISSED_UPDATE, UNSETTLED):
            workers.unfence(worker.name)
        elif not has_it and not worker.fence:
            workers.fence(worker.name, MISSED_UPDATE)


def in_common(all_capabilities: Sequence[Capabilities]) -> Capabilities:
    """Return the capabilities that every worker has. Raises `EngineUnavailable` without one."""
    if not all_capabilities:
        raise EngineUnavailable("the pool has no worker; start one")
    first, routers = all_capabilities[0], {each.routed_experts for each in all_capabilities} - {None}
    return replace(
        first,
        context_length=min(each.context_length for each in all_capabilities),
        pause_modes=frozenset.intersection(*(each.pause_modes for each in all_capabilities)),
        max_top_logprobs=min(each.max_top_logprobs for each in all_capabilities),
        follows_json_schema=all(each.follows_json_schema for each in all_capabilities),
        can_update_weights=all(each.can_update_weights for each in all_capabilities),
        version=" and ".join(sorted({each.version for each in all_capabilities})),
        # The pool sends scripts only to workers that follow them, and wishes for rows to those that return some.
        # Each worker keeps to its own bound of masks.
        follows_scripts=any(each.follows_scripts for each in all_capabilities),
        max_mask_ids=max(each.max_mask_ids for each in all_capabilities),
        routed_experts=routers.pop() if len(routers) == 1 else None,
    )


def _require_alike(all_capabilities: Sequence[Capabilities]) -> None:
    for what in ("vocab_size", "logprob_scale", "weights_digest", "repeat_guard"):
        found = sorted({str(getattr(each, what)) for each in all_capabilities})
        if len(found) > 1:
            raise ScenarioError(f"the workers of a pool must serve one model: {what} is {' and '.join(found)}")

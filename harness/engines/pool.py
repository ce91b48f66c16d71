"""Several engines as one `TokenProvider`.

Generations are placed by `placement`; control verbs go to every worker at once, and what fails is collected into one
error that names each worker and its failure. A worker that cannot be reached when a request is placed is passed over:
the request has not been sampled there, so nothing is generated twice. Once a token has come, no request moves.

Workers may join and leave while the pool serves. A worker is entered (its self-test included) before it serves, and
left when its last request has ended. `fence` keeps one from serving without letting it go: its sessions move, control
still reaches it.

All workers must serve the same vocabulary on the same logprob scale, and the same weights: a worker that joins with
older weights than the others is fenced until it reports theirs, and so is one that `probe` finds behind.
The pool does not start or restart engines, and does not find them; see `discovered`.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import structlog

from harness.engines.base import Capabilities, EngineHealth, PauseMode, TokenProvider
from harness.engines.placement import Place, Placement, WorkerLoad
from harness.engines.queueing import AbortedWaiting, Queue
from harness.errors import EngineError, EngineRejected, EngineUnavailable, ScenarioError, UnknownWeightVersion
from harness.samples.versions import policy_version
from harness.types import (
    FinishReason,
    GenerationDelta,
    GenerationResult,
    PromptLogprobs,
    SamplingParams,
    TokenIds,
    as_ids,
    as_logprobs,
)

log = structlog.get_logger()

_T = TypeVar("_T")

MISSED_UPDATE = "it missed the update of its weights"
"""Fences a worker whose weights are older than the others', until it has caught up."""


class WorkerStatus(NamedTuple):
    """One worker of a pool, as it stands."""

    name: str
    """Its URL; its position in a pool that was given its workers."""
    weight_version: str
    fence: str
    """Why it serves nobody; empty while it serves."""
    in_flight: int
    sessions: int
    """Sessions that were served there last."""


class PoolObserver(Protocol):
    """Counts what a pool does; the metrics of a server are one."""

    def session_moved(self, recomputed_tokens: int) -> None:
        """A session was served by another worker than before, which had to compute that many tokens anew."""

    def workers_serving(self, count: int) -> None:
        """How many workers serve now."""


class _Nobody:
    """Counts nothing."""

    def session_moved(self, recomputed_tokens: int) -> None:
        """See `PoolObserver`."""

    def workers_serving(self, count: int) -> None:
        """See `PoolObserver`."""


@dataclass(slots=True)
class _Member:
    """A worker that has been entered."""

    provider: TokenProvider
    load: WorkerLoad
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    is_leaving: bool = False


class EnginePool:
    """Serves through `workers`, which it enters and leaves, and through those that `join` later.

    Args:
        workers: Those to begin with.
        limit: Requests that one worker has in flight at most; further ones wait here. None does not bound them.
        queue_timeout_s: How long a request waits for a worker before it is `EngineUnavailable`.
    """

    def __init__(
        self, workers: Sequence[TokenProvider], *, limit: int | None = None, queue_timeout_s: float = 600.0
    ) -> None:
        self._begin_with = {str(index): worker for index, worker in enumerate(workers)}
        self._members: dict[str, _Member] = {}
        self._placement = Placement(limit)
        self._queue = Queue(self._placement, queue_timeout_s, self._standing)
        self._by_load: dict[WorkerLoad, _Member] = {}
        self._serving: dict[str, _Member] = {}
        self._paused: PauseMode | None = None
        self._observer: PoolObserver = _Nobody()

    @property
    def capabilities(self) -> Capabilities:
        """What every worker can do. Raises `EngineUnavailable` while there is none."""
        providers = [member.provider for member in self._members.values()] or list(self._begin_with.values())
        if not providers:
            raise EngineUnavailable("the pool has no worker; start one")
        return _common([provider.capabilities for provider in providers])

    @property
    def weight_version(self) -> str:
        """The label of all workers that serve; the oldest one while they disagree."""
        serving = [member.provider for member in self._members.values() if not member.load.fence]
        providers = serving or [member.provider for member in self._members.values()] or self._begin_with.values()
        return min((provider.weight_version for provider in providers), key=_age, default="")

    @property
    def workers(self) -> list[WorkerStatus]:
        """Every worker, in the order in which they joined."""
        return [
            WorkerStatus(name, each.provider.weight_version, each.load.fence, each.load.in_flight, each.load.sessions)
            for name, each in self._members.items()
        ]

    @property
    def providers(self) -> dict[str, TokenProvider]:
        """Every worker by its name, for whoever has to treat them one by one."""
        return {name: member.provider for name, member in self._members.items()}

    @property
    def waiting(self) -> int:
        """Requests that wait for a worker."""
        return self._placement.waiting

    async def __aenter__(self) -> Self:
        if not self._begin_with:
            raise ScenarioError("an engine pool needs at least one worker, got none")
        try:
            for name, worker in self._begin_with.items():
                await self.join(name, worker)
        except BaseException:
            await self._leave_all()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leave_all()

    def expect_pause(self, mode: PauseMode | None) -> None:
        """Somebody else has paused the workers, or continued them (None): those that join do the same."""
        self._paused = mode

    def observe(self, observer: PoolObserver) -> None:
        """Have `observer` count from now on."""
        self._observer = observer
        self._changed()

    # Membership

    async def join(self, name: str, worker: TokenProvider) -> None:
        """Enter `worker` and let it serve as `name`; in a paused pool it is paused first.

        Raises `ScenarioError` when it serves another model than the others, and what entering it raises.
        """
        if name in self._members:
            raise ScenarioError(f"the pool has a worker {name} already")
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(worker)
            _require_alike([*(member.provider.capabilities for member in self._members.values()), worker.capabilities])
            await self._catch_up(worker)
            member = _Member(worker, self._placement.join(name), stack.pop_all())
            self._members[name] = self._by_load[member.load] = member
        log.info("worker_joined", worker=name, weight_version=worker.weight_version)
        self._fence_stale(name)
        self._changed()

    async def _catch_up(self, worker: TokenProvider) -> None:
        """Pause `worker` when the pool is paused, also when that changes meanwhile."""
        mode = None
        while mode is not self._paused:
            mode = self._paused
            await (worker.resume() if mode is None else worker.pause(mode))

    async def retire(self, name: str, reason: str, *, at_once: bool = False) -> None:
        """Send nothing more to the worker and leave it when its requests have ended, or `at_once`."""
        member = self._members.pop(name)
        self._placement.leave(name)
        log.info("worker_retired", worker=name, reason=reason, in_flight=member.load.in_flight)
        self._changed()
        member.is_leaving = True
        if at_once or not member.load.in_flight:
            await self._close(member)

    async def _close(self, member: _Member) -> None:
        if not member.load.in_flight:
            self._by_load.pop(member.load, None)
        await member.stack.aclose()

    def fence(self, name: str, reason: str) -> None:
        """The worker serves no session until `unfence`; what it works on goes on, control still reaches it."""
        self._members[name].load.fence = reason
        log.warning("worker_fenced", worker=name, reason=reason)
        self._changed()

    def unfence(self, name: str) -> None:
        """The worker serves again. Idempotent."""
        self._members[name].load.fence = ""
        self._changed()

    def _changed(self) -> None:
        self._observer.workers_serving(sum(not member.load.fence for member in self._members.values()))
        self._queue.grant()

    async def _leave_all(self) -> None:
        async with AsyncExitStack() as stack:
            for name in list(self._members):
                self._placement.leave(name)
                stack.push_async_exit(self._members.pop(name).stack)

    # Generating

    async def generate(
        self,
        input_ids: TokenIds,
        params: SamplingParams,
        *,
        request_id: str,
        session_id: str | None = None,
        prompt_logprobs_from: int | None = None,
    ) -> GenerationResult:
        """See `TokenProvider.generate`."""
        before = self._placement.place_of(session_id)

        async def ask(member: _Member) -> GenerationResult:
            result = await member.provider.generate(
                input_ids,
                params,
                request_id=request_id,
                session_id=session_id,
                prompt_logprobs_from=prompt_logprobs_from,
            )
            self._settle(session_id, before, member, result)
            return result

        try:
            return await self._placed(session_id, request_id, ask)
        except AbortedWaiting:
            return _nothing_sampled(request_id, input_ids)

    async def stream(
        self,
        input_ids: TokenIds,
        params: SamplingParams,
        *,
        request_id: str,
        session_id: str | None = None,
        prompt_logprobs_from: int | None = None,
    ) -> AsyncIterator[GenerationDelta | GenerationResult]:
        """See `TokenProvider.stream`; the request moves to another worker only before its first delta."""
        before = self._placement.place_of(session_id)
        tried: set[str] = set()
        while True:
            try:
                member = await self._worker_for(session_id, tried, request_id)
            except AbortedWaiting:
                yield _nothing_sampled(request_id, input_ids)
                return
            has_begun = False
            pieces: Any = member.provider.stream(
                input_ids,
                params,
                request_id=request_id,
                session_id=session_id,
                prompt_logprobs_from=prompt_logprobs_from,
            )
            try:
                async with self._busy(member, request_id), aclosing(pieces):
                    async for piece in pieces:
                        has_begun = True
                        if isinstance(piece, GenerationResult):
                            self._settle(session_id, before, member, piece)
                        yield piece
                return
            except EngineUnavailable:
                if has_begun or self._placement.is_exhausted(tried):
                    raise

    async def score(self, input_ids: TokenIds, *, start: int) -> PromptLogprobs:
        """See `TokenProvider.score`."""
        return await self._placed(None, None, lambda member: member.provider.score(input_ids, start=start))

    async def _placed(
        self, session_id: str | None, request_id: str | None, ask: Callable[[_Member], Awaitable[_T]]
    ) -> _T:
        tried: set[str] = set()
        while True:
            member = await self._worker_for(session_id, tried, request_id)
            try:
                async with self._busy(member, request_id):
                    return await ask(member)
            except EngineUnavailable:
                if self._placement.is_exhausted(tried):
                    raise

    async def _worker_for(self, session_id: str | None, tried: set[str], request_id: str | None) -> _Member:
        return self._by_load[await self._queue.worker_for(session_id, tried, request_id)]

    def _standing(self) -> str:
        found = "; ".join(f"{each.name}: {each.fence or f'{each.in_flight} in flight'}" for each in self.workers)
        return found or "no worker at all"

    @asynccontextmanager
    async def _busy(self, member: _Member, request_id: str | None) -> AsyncGenerator[None]:
        """The worker serves the request; whatever comes of it, its place is free afterwards."""
        try:
            with self._named(member, request_id):
                yield
            member.load.failed_at = None
        except EngineUnavailable:
            member.load.failed_at = asyncio.get_running_loop().time()
            raise
        finally:
            self._queue.finish(member.load)
            if member.is_leaving and not member.load.in_flight:
                await self._close(member)

    @contextmanager
    def _named(self, member: _Member, request_id: str | None) -> Iterator[None]:
        if request_id is None:
            yield
            return
        if request_id in self._serving:
            raise EngineRejected(f"request id {request_id} is in use; every request needs a fresh one")
        self._serving[request_id] = member
        try:
            yield
        finally:
            del self._serving[request_id]

    def _settle(self, session_id: str | None, before: Place | None, member: _Member, result: GenerationResult) -> None:
        self._placement.settle(session_id, member.load, result.input_ids.size + result.output_ids.size)
        if before is None or before.worker is member.load:
            return
        recomputed = max(0, min(before.tokens, result.input_ids.size) - result.cached_tokens)
        self._observer.session_moved(recomputed)
        log.info(
            "session_moved",
            session_id=session_id,
            before=before.worker.name,
            after=member.load.name,
            prompt_tokens=result.input_ids.size,
            cached_tokens=result.cached_tokens,
            recomputed_tokens=recomputed,
        )

    # Control

    async def abort(self, request_id: str | None) -> int:
        """See `TokenProvider.abort`."""
        waiting = self._queue.abort(request_id)
        member = None if request_id is None else self._serving.get(request_id)
        if member is not None:
            return await member.provider.abort(request_id)
        if waiting and request_id is not None:
            return waiting
        return waiting + sum(await self._everywhere("abort", lambda worker: worker.abort(request_id)))

    async def pause(self, mode: PauseMode) -> None:
        """See `TokenProvider.pause`; workers that could be paused stay paused when another one fails."""
        self._paused = mode
        await self._everywhere("pause", lambda worker: worker.pause(mode))

    async def resume(self) -> None:
        """See `TokenProvider.resume`."""
        self._paused = None
        await self._everywhere("resume", lambda worker: worker.resume())

    async def update_weights(self, path: Path, version: str) -> None:
        """See `TokenProvider.update_weights`; after a failure workers may serve different versions."""
        await self._everywhere(f"update to version {version}", lambda worker: worker.update_weights(path, version))
        self._fence_stale(*self._members)

    async def health(self) -> EngineHealth:
        """Ready while any worker is, paused when every ready one is; details come per worker."""
        states = await self.probe()
        ready = [state for state in states.values() if state.ready]
        return EngineHealth(
            ready=bool(ready),
            paused=bool(ready) and all(state.paused for state in ready),
            running=sum(state.running for state in states.values()),
            waiting=sum(state.waiting for state in states.values()) + self.waiting,
            detail="; ".join(f"{name}: {'ready' if s.ready else 'NOT ready'} {s.detail}" for name, s in states.items()),
        )

    async def probe(self) -> dict[str, EngineHealth]:
        """A look at every worker; one that has fallen behind the others' weights is fenced until it has caught up."""
        members = dict(self._members)
        states = await asyncio.gather(*(member.provider.health() for member in members.values()))
        for name, member in members.items():
            is_stale = _age(member.provider.weight_version) < self._newest()
            if is_stale and not member.load.fence:
                self.fence(name, MISSED_UPDATE)
            elif not is_stale and member.load.fence == MISSED_UPDATE:
                self.unfence(name)
        return dict(zip(members, states, strict=True))

    def _newest(self) -> int:
        return max((_age(each.provider.weight_version) for each in self._members.values()), default=0)

    def _fence_stale(self, *names: str) -> None:
        for name in names:
            if _age(self._members[name].provider.weight_version) < self._newest():
                self.fence(name, MISSED_UPDATE)

    async def _everywhere(self, what: str, verb: Callable[[TokenProvider], Awaitable[_T]]) -> list[_T]:
        """The answers of all workers; when one fails, the failures of all of them as one error."""
        members = dict(self._members)
        told = await asyncio.gather(*(verb(each.provider) for each in members.values()), return_exceptions=True)
        failures = {
            name: answer for name, answer in zip(members, told, strict=True) if isinstance(answer, BaseException)
        }
        unexpected = next((failure for failure in failures.values() if not isinstance(failure, EngineError)), None)
        if unexpected is not None:
            raise unexpected
        if failures:
            raise _collected(what, len(members), failures)
        return [answer for answer in told if not isinstance(answer, BaseException)]


def _nothing_sampled(request_id: str, input_ids: TokenIds) -> GenerationResult:
    """The result of a request that was aborted before it had a worker."""
    return GenerationResult(request_id, input_ids, as_ids(()), as_logprobs(()), FinishReason.ABORT, ())


def _age(label: str) -> int:
    """The policy version of a label; one that is none is older than all."""
    try:
        return policy_version(label)
    except UnknownWeightVersion:
        return -1


def _collected(what: str, asked: int, failures: Mapping[str, BaseException]) -> EngineError:
    """One error for all failures: of their type when they share one."""
    errors = {name: error for name, error in failures.items() if isinstance(error, EngineError)}
    kinds = {type(error) for error in errors.values()}
    kind = kinds.pop() if len(kinds) == 1 else EngineError
    details = "; ".join(f"worker {name}: {error.message}" for name, error in errors.items())
    return kind(f"{len(errors)} of {asked} workers failed to {what}: {details}")


def _common(all_capabilities: Sequence[Capabilities]) -> Capabilities:
    first = all_capabilities[0]
    return Capabilities(
        engine=first.engine,
        model=first.model,
        vocab_size=first.vocab_size,
        context_length=min(each.context_length for each in all_capabilities),
        logprob_scale=first.logprob_scale,
        pause_modes=frozenset.intersection(*(each.pause_modes for each in all_capabilities)),
        max_top_logprobs=min(each.max_top_logprobs for each in all_capabilities),
        can_update_weights=all(each.can_update_weights for each in all_capabilities),
        weights_digest=first.weights_digest,
        repeat_guard=first.repeat_guard,
    )


def _require_alike(all_capabilities: Sequence[Capabilities]) -> None:
    """Raises `ScenarioError` when a session could not move from one worker to another."""
    for what in ("vocab_size", "logprob_scale", "weights_digest", "repeat_guard"):
        found = sorted({str(getattr(each, what)) for each in all_capabilities})
        if len(found) > 1:
            raise ScenarioError(f"the workers of a pool must serve one model: {what} is {' and '.join(found)}")

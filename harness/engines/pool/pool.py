"""Several engines as one `TokenProvider`.

`placement` places generations; `workers` keeps the members. Control verbs go to every worker at once; failures are
collected into one error that names each worker. A worker that cannot be reached is skipped: nothing was sampled there.
After its first token a request never moves. The pool does not start, restart or find engines; see `discovered`.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

from msgspec import structs

from harness.engines.base import Capabilities, ContinuesAtEntry, EngineHealth, PauseMode, ProvesScripts, TokenProvider
from harness.engines.pool.placement import Place, Placement, WorkerLoad
from harness.engines.pool.queueing import AbortedWaiting, Queue
from harness.engines.pool.workers import Workers, in_common
from harness.errors import EngineError, EngineRejected, EngineUnavailable, ScenarioError, WeightsUnsettled
from harness.machine.log import get_logger
from harness.samples.versions import is_unsettled
from harness.types import (
    FinishReason,
    GenerationDelta,
    GenerationRequest,
    GenerationResult,
    PromptLogprobs,
    TokenIds,
    as_ids,
    as_logprobs,
)

log = get_logger(__name__)

_T = TypeVar("_T")


class EnginePool:
    """Enters, serves through and leaves its workers.

    Args:
        workers: Initial workers; others may join later.
        limit: Maximum requests in flight per worker; further ones wait here.
        queue_timeout_s: Longest wait for a worker before `EngineUnavailable`.
    """

    def __init__(
        self, workers: Sequence[TokenProvider], *, limit: int | None = None, queue_timeout_s: float = 600.0
    ) -> None:
        self._begin_with = {str(index): worker for index, worker in enumerate(workers)}
        self._placement = Placement(limit)
        self._queue = Queue(self._placement, queue_timeout_s, self._standing)
        self.workers = Workers(self._placement, self._queue.grant)
        self.continues_at_entry = False
        """See `ContinuesAtEntry`; applies to workers that join."""
        self.proves_scripts = False
        """See `ProvesScripts`; applies to workers that join."""
        self._serving: dict[str, TokenProvider] = {}
        self._shared: tuple[list[Capabilities], Capabilities] | None = None
        """Cached, because capabilities are read several times a turn."""

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities all workers share, or the last worker's. Raises `EngineUnavailable` before the first."""
        providers = self.workers.known or self._begin_with
        stated = [provider.capabilities for provider in providers.values()]
        if self._shared is None or self._shared[0] != stated:
            self._shared = stated, in_common(stated)
        shared = self._shared[1]
        # Scripts stay accepted after the last worker that follows them has left; they wait for the next one.
        if shared.follows_scripts or not self.workers.have_followed_scripts:
            return shared
        return replace(shared, follows_scripts=True)

    @property
    def weight_version(self) -> str:
        """Oldest label of the serving workers; the last known one while none serves."""
        # An empty pool keeps a label, so requests wait for a worker instead of being refused.
        providers = self.workers.serving or self.workers.known or self._begin_with
        return self.workers.oldest(provider.weight_version for provider in providers.values())

    @property
    def waiting(self) -> int:
        return self._placement.waiting

    async def __aenter__(self) -> Self:
        if not self._begin_with:
            raise ScenarioError("an engine pool needs at least one worker, got none")
        try:
            for name, worker in self._begin_with.items():
                await self._join(name, worker)
        except BaseException:
            await self.workers.leave_all()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.workers.leave_all()

    async def _join(self, name: str, worker: TokenProvider) -> None:
        if self.continues_at_entry and isinstance(worker, ContinuesAtEntry):
            worker.continues_at_entry = True
        if self.proves_scripts and isinstance(worker, ProvesScripts):
            worker.proves_scripts = True
        await self.workers.join(name, worker)

    # Generating

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """See `TokenProvider.generate`; the request moves to another worker only before its first delta."""
        asked, has_begun, began = request, False, time.monotonic()
        if request.on_delta is not None:
            tell = request.on_delta

            def hear(delta: GenerationDelta) -> None:
                nonlocal has_begun
                has_begun |= bool(delta.output_ids.size)
                tell(delta)

            asked = replace(request, on_delta=hear)

        async def ask(worker: TokenProvider) -> AsyncGenerator[GenerationResult]:
            try:
                yield await worker.generate(asked)
            except EngineError as error:
                error.may_have_sampled |= has_begun  # the caller has tokens, even if the provider reports none
                raise

        try:
            pieces = self._serve(ask, request.session_id, request)
            return await _only(pieces)
        except AbortedWaiting:
            return structs.replace(_nothing_sampled(request), queued_s=time.monotonic() - began)

    async def stream(self, request: GenerationRequest) -> AsyncIterator[GenerationDelta | GenerationResult]:
        """See `TokenProvider.stream`; the request moves to another worker only before its first delta."""

        def ask(worker: TokenProvider) -> AsyncIterator[GenerationDelta | GenerationResult]:
            return worker.stream(request)

        try:
            served = self._serve(ask, request.session_id, request)
            async with aclosing(served) as pieces:
                async for piece in pieces:
                    yield piece
        except AbortedWaiting:
            yield _nothing_sampled(request)

    async def score(
        self, input_ids: TokenIds, *, start: int, session_id: str | None = None, top: int = 0
    ) -> PromptLogprobs:
        """See `TokenProvider.score`; served by the worker with the session's prefix."""

        async def ask(worker: TokenProvider) -> AsyncGenerator[PromptLogprobs]:
            yield await worker.score(input_ids, start=start, session_id=session_id, top=top)

        return await _only(self._serve(ask, session_id))

    async def _serve(
        self,
        ask: Callable[[TokenProvider], AsyncIterator[_T]],
        session_id: str | None,
        request: GenerationRequest | None = None,
    ) -> AsyncGenerator[_T]:
        """Yield a worker's answer, piece by piece. A script, or a request for rows, goes to a worker that can."""
        # Theory of operation. A request may move to another worker only while nothing has come back from the first:
        # then no token was seen, and asking again hands none out twice (I5). From the first piece on, the answer
        # belongs to its worker. Another worker would sample other tokens, perhaps with other weights, after those the
        # caller already has. A later failure therefore goes to the caller, who knows what arrived and continues the
        # turn in a new request. Only `EngineUnavailable` justifies asking another worker, and only if the first cannot
        # have sampled. What one worker refuses (`EngineRejected`), all refuse; and after a broken connection
        # (`EngineConnectionLost`) an engine may be sampling. Each worker is asked at most once.
        before = self._placement.place_of(session_id)
        request_id = None if request is None else request.request_id
        tried: set[str] = set()
        queued_s = 0.0
        while True:
            if request is not None:
                tried.update(self._find_unable(request))
            waits_since = time.monotonic()
            worker = await self._choose_worker(session_id, tried, request)
            queued_s += time.monotonic() - waits_since
            if _is_unable(self.workers.provider_of(worker), request):  # it joined while we waited
                self._queue.finish(worker)
                await self.workers.let_go(worker)
                continue
            pieces = self._forward(worker, ask, session_id, request_id, before)
            try:
                first = await anext(pieces)
                break
            except StopAsyncIteration:
                return  # the reader notices that the last piece is missing
            except EngineUnavailable as error:
                if error.may_have_sampled or self._placement.is_exhausted(tried):
                    raise
        async with aclosing(pieces):
            yield _tell_place(first, worker, queued_s)
            async for piece in pieces:
                yield _tell_place(piece, worker, queued_s)

    def _find_unable(self, request: GenerationRequest) -> list[str]:
        providers = self.workers.providers
        unable = [name for name, each in providers.items() if _is_unable(each, request)]
        if not unable or len(unable) < len(providers):
            return unable
        if request.script_ids is None:
            raise EngineUnavailable("no worker returns the rows that the session records; start one that does")
        if not self.workers.have_followed_scripts:
            raise EngineRejected(
                f"{self.capabilities.engine} is not known to follow scripts (docs/scenarios.md);"
                " nothing is sampled in their place"
            )
        return unable

    async def _choose_worker(
        self, session_id: str | None, tried: set[str], request: GenerationRequest | None
    ) -> WorkerLoad:
        request_id, prompt = (None, None) if request is None else (request.request_id, request.input_ids)
        try:
            return await self._queue.worker_for(session_id, tried, request_id, prompt)
        except BaseException:
            await self.workers.let_idle_go()  # the freed place may have been the last at a retired worker
            raise

    async def _forward(
        self,
        worker: WorkerLoad,
        ask: Callable[[TokenProvider], AsyncIterator[_T]],
        session_id: str | None,
        request_id: str | None,
        before: Place | None,
    ) -> AsyncGenerator[_T]:
        pieces: Any = ask(self.workers.provider_of(worker))
        async with self._busy(worker, request_id), aclosing(pieces):
            async for piece in pieces:
                if isinstance(piece, GenerationResult):
                    self._note_place(session_id, before, worker, piece)
                yield piece

    def _standing(self) -> str:
        found = "; ".join(f"{each.name}: {each.fence or f'{each.in_flight} in flight'}" for each in self.workers)
        return found or "no workers"

    @asynccontextmanager
    async def _busy(self, worker: WorkerLoad, request_id: str | None) -> AsyncGenerator[None]:
        try:
            with self._register(worker, request_id):
                yield
            worker.failed_at = None
        except EngineUnavailable:
            worker.failed_at = asyncio.get_running_loop().time()
            raise
        finally:
            self._queue.finish(worker)
            await self.workers.let_go(worker)

    @contextmanager
    def _register(self, worker: WorkerLoad, request_id: str | None) -> Iterator[None]:
        if request_id is None:
            yield
            return
        if request_id in self._serving:
            raise EngineRejected(f"request id {request_id} is in use; every request needs a fresh one")
        self._serving[request_id] = self.workers.provider_of(worker)
        try:
            yield
        finally:
            del self._serving[request_id]

    def _note_place(
        self, session_id: str | None, before: Place | None, worker: WorkerLoad, result: GenerationResult
    ) -> None:
        self._placement.place(session_id, worker, result.input_ids.size + result.output_ids.size)
        if before is None or before.worker is worker:
            return
        recomputed = max(0, min(before.tokens, result.input_ids.size) - result.cached_tokens)
        if self.workers.observer is not None:
            self.workers.observer.session_moved(recomputed)
        log.info(
            "session_moved",
            session_id=session_id,
            before=before.worker.name,
            after=worker.name,
            prompt_tokens=result.input_ids.size,
            cached_tokens=result.cached_tokens,
            recomputed_tokens=recomputed,
        )

    # Control

    async def abort(self, request_id: str | None) -> int:
        waiting = self._queue.abort(request_id)
        worker = None if request_id is None else self._serving.get(request_id)
        if worker is not None:
            return await worker.abort(request_id)
        if waiting and request_id is not None:
            return waiting
        return waiting + sum(await self._everywhere("abort", lambda worker: worker.abort(request_id)))

    async def pause(self, mode: PauseMode) -> None:
        """See `TokenProvider.pause`; paused workers stay paused if another one fails."""
        self.workers.expect_pause(mode)
        await self._everywhere("pause", lambda worker: worker.pause(mode))

    async def resume(self) -> None:
        """See `TokenProvider.resume`; workers with unsettled weights stay paused and fenced."""

        async def resume(worker: TokenProvider) -> None:
            with suppress(WeightsUnsettled):
                await worker.resume()

        self.workers.expect_pause(None)
        await self._everywhere("resume", resume)
        self.workers.judge_weights()
        if is_unsettled(self.weight_version):
            raise WeightsUnsettled("every worker stays paused: an update of its weights is in progress or failed")

    async def update_weights(self, path: Path, version: str) -> None:
        """See `TokenProvider.update_weights`; a worker that fails while another succeeds is fenced."""
        try:
            await self._everywhere(f"update to version {version}", lambda worker: worker.update_weights(path, version))
        finally:
            self.workers.judge_weights()

    async def read_version(self) -> str:
        """Ask every worker, and fence by the answers. Raises if one does not answer; the other answers still count."""
        try:
            await self._everywhere("report what they serve", lambda worker: worker.read_version())
        finally:
            self.workers.judge_weights()
        return self.weight_version

    async def health(self) -> EngineHealth:
        """Report ready if any worker is, paused if every ready one is."""
        states = await self._states()
        ready = [state for state in states.values() if state.ready]
        return EngineHealth(
            ready=bool(ready),
            paused=bool(ready) and all(state.paused for state in ready),
            running=sum(state.running for state in states.values()),
            waiting=sum(state.waiting for state in states.values()) + self.waiting,
            detail="; ".join(f"{name}: {'ready' if s.ready else 'NOT ready'} {s.detail}" for name, s in states.items()),
        )

    async def probe(self) -> dict[str, EngineHealth]:
        """Return every worker's health; fence workers with older weights."""
        with suppress(EngineError):  # `health` shows which worker does not answer
            await self.read_version()
        return await self._states()

    async def _states(self) -> dict[str, EngineHealth]:
        workers = self.workers.providers
        return dict(zip(workers, await asyncio.gather(*(each.health() for each in workers.values())), strict=True))

    async def _everywhere(self, what: str, verb: Callable[[TokenProvider], Awaitable[_T]]) -> list[_T]:
        workers = self.workers.providers
        told = await asyncio.gather(*(verb(worker) for worker in workers.values()), return_exceptions=True)
        failures: dict[str, EngineError] = {}
        for name, answer in zip(workers, told, strict=True):
            if isinstance(answer, EngineError):
                failures[name] = answer
            elif isinstance(answer, BaseException):
                raise answer
        if failures:
            kinds = {type(error) for error in failures.values()}
            kind = kinds.pop() if len(kinds) == 1 else EngineError
            details = "; ".join(f"worker {name}: {error.message}" for name, error in failures.items())
            raise kind(f"{len(failures)} of {len(workers)} workers failed to {what}: {details}")
        return [answer for answer in told if not isinstance(answer, BaseException)]


def _is_unable(worker: TokenProvider, request: GenerationRequest | None) -> bool:
    able = worker.capabilities
    return request is not None and (
        (request.script_ids is not None and not able.follows_scripts)
        or (request.params.sampling_mask and not able.max_mask_ids)
        or (request.rows_from is not None and able.routed_experts is None)
    )


def _tell_place(piece: _T, worker: WorkerLoad, queued_s: float) -> _T:
    if isinstance(piece, GenerationResult):
        return structs.replace(piece, worker=worker.name, queued_s=queued_s)
    return piece


async def _only(pieces: AsyncIterator[_T]) -> _T:
    [piece] = [piece async for piece in pieces]
    return piece


def _nothing_sampled(request: GenerationRequest) -> GenerationResult:
    return GenerationResult(request.request_id, request.input_ids, as_ids(()), as_logprobs(()), FinishReason.ABORT, ())

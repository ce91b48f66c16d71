"""Several engines as one `TokenProvider`.

Generations are placed by `placement`; control verbs go to every worker at once, and what fails is collected into one
error that names each worker and its failure. A worker that cannot be reached when a request is placed is passed over:
the request has not been sampled there, so nothing is generated twice. Once a token has come, no request moves.

All workers must serve the same vocabulary on the same logprob scale, and the same weights; `update_weights` says so
when they no longer do. The pool does not restart engines.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from harness.engines.base import Capabilities, EngineHealth, PauseMode, TokenProvider
from harness.engines.placement import Placement, WorkerLoad
from harness.errors import EngineError, EngineRejected, EngineUnavailable, ScenarioError
from harness.samples.versions import policy_version
from harness.types import GenerationDelta, GenerationResult, PromptLogprobs, SamplingParams, TokenIds

_T = TypeVar("_T")


class EnginePool:
    """Serves through `workers`, which it enters and leaves."""

    def __init__(self, workers: Sequence[TokenProvider]) -> None:
        if not workers:
            raise ScenarioError("an engine pool needs at least one worker, got none")
        self._workers = tuple(workers)
        self._placement = Placement([WorkerLoad() for _ in workers])
        self._serving: dict[str, int] = {}
        self._entered = AsyncExitStack()

    @property
    def capabilities(self) -> Capabilities:
        """What every worker can do."""
        return _common([worker.capabilities for worker in self._workers])

    @property
    def weight_version(self) -> str:
        """The label of all workers; the oldest one while they disagree."""
        return min((worker.weight_version for worker in self._workers), key=policy_version)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            for worker in self._workers:
                await stack.enter_async_context(worker)
            _require_alike([worker.capabilities for worker in self._workers])
            self._entered = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._entered.__aexit__(kind, error, trace)

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
        return await self._placed(
            session_id,
            request_id,
            lambda worker: worker.generate(
                input_ids,
                params,
                request_id=request_id,
                session_id=session_id,
                prompt_logprobs_from=prompt_logprobs_from,
            ),
        )

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
        for index in self._offers(session_id):
            has_begun = False
            pieces: Any = self._workers[index].stream(
                input_ids,
                params,
                request_id=request_id,
                session_id=session_id,
                prompt_logprobs_from=prompt_logprobs_from,
            )
            try:
                with self._busy(index, request_id):
                    async with aclosing(pieces):
                        async for piece in pieces:
                            has_begun = self._has_begun(index, session_id)
                            yield piece
                return
            except EngineUnavailable as error:
                self._failed(index)
                if has_begun:
                    raise
                last = error
        raise last

    async def score(self, input_ids: TokenIds, *, start: int) -> PromptLogprobs:
        """See `TokenProvider.score`."""
        return await self._placed(None, None, lambda worker: worker.score(input_ids, start=start))

    async def abort(self, request_id: str | None) -> int:
        """See `TokenProvider.abort`."""
        index = None if request_id is None else self._serving.get(request_id)
        if index is not None:
            return await self._workers[index].abort(request_id)
        return sum(await self._everywhere("abort", lambda worker: worker.abort(request_id)))

    async def pause(self, mode: PauseMode) -> None:
        """See `TokenProvider.pause`; workers that could be paused stay paused when another one fails."""
        await self._everywhere("pause", lambda worker: worker.pause(mode))

    async def resume(self) -> None:
        """See `TokenProvider.resume`."""
        await self._everywhere("resume", lambda worker: worker.resume())

    async def update_weights(self, path: Path, version: str) -> None:
        """See `TokenProvider.update_weights`; after a failure workers may serve different versions."""
        await self._everywhere(f"update to version {version}", lambda worker: worker.update_weights(path, version))

    async def health(self) -> EngineHealth:
        """Ready while any worker is, paused when every ready one is; details come per worker."""
        states = await asyncio.gather(*(worker.health() for worker in self._workers))
        ready = [state for state in states if state.ready]
        return EngineHealth(
            ready=bool(ready),
            paused=bool(ready) and all(state.paused for state in ready),
            running=sum(state.running for state in states),
            waiting=sum(state.waiting for state in states),
            detail="; ".join(f"{i}: {'ready' if s.ready else 'NOT ready'} {s.detail}" for i, s in enumerate(states)),
        )

    async def _placed(
        self, session_id: str | None, request_id: str | None, ask: Callable[[TokenProvider], Awaitable[_T]]
    ) -> _T:
        for index in self._offers(session_id):
            try:
                with self._busy(index, request_id):
                    answer = await ask(self._workers[index])
            except EngineUnavailable as error:
                self._failed(index)
                last = error
            else:
                self._has_begun(index, session_id)
                return answer
        raise last

    def _offers(self, session_id: str | None) -> list[int]:
        return self._placement.order(session_id, asyncio.get_running_loop().time())

    @contextmanager
    def _busy(self, index: int, request_id: str | None) -> Iterator[None]:
        if request_id in self._serving:
            raise EngineRejected(f"request id {request_id} is in use; every request needs a fresh one")
        self._placement.workers[index].in_flight += 1
        if request_id is not None:
            self._serving[request_id] = index
        try:
            yield
        finally:
            self._placement.workers[index].in_flight -= 1
            if request_id is not None:
                self._serving.pop(request_id, None)

    def _has_begun(self, index: int, session_id: str | None) -> bool:
        self._placement.workers[index].failed_at = None
        self._placement.settle(session_id, index)
        return True

    def _failed(self, index: int) -> None:
        self._placement.workers[index].failed_at = asyncio.get_running_loop().time()

    async def _everywhere(self, what: str, verb: Callable[[TokenProvider], Awaitable[_T]]) -> list[_T]:
        """The answers of all workers; when one fails, the failures of all of them as one error."""
        answers = await asyncio.gather(*(verb(worker) for worker in self._workers), return_exceptions=True)
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        unexpected = next((failure for failure in failures if not isinstance(failure, EngineError)), None)
        if unexpected is not None:
            raise unexpected
        if failures:
            raise _collected(what, answers)
        return [answer for answer in answers if not isinstance(answer, BaseException)]


def _collected(what: str, answers: Sequence[object]) -> EngineError:
    """One error for all failures: of their type when they share one."""
    failures = {index: answer for index, answer in enumerate(answers) if isinstance(answer, EngineError)}
    kinds = Counter(type(error) for error in failures.values())
    kind = next(iter(kinds)) if len(kinds) == 1 else EngineError
    details = "; ".join(f"worker {index}: {error.message}" for index, error in failures.items())
    return kind(f"{len(failures)} of {len(answers)} workers failed to {what}: {details}")


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
    )


def _require_alike(all_capabilities: Sequence[Capabilities]) -> None:
    """Raises `ScenarioError` when a session could not move from one worker to another."""
    for what in ("vocab_size", "logprob_scale", "weights_digest"):
        found = sorted({str(getattr(each, what)) for each in all_capabilities})
        if len(found) > 1:
            raise ScenarioError(f"the workers of a pool must serve one model: {what} is {' and '.join(found)}")

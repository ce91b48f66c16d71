"""The weight version that each engine serves now.

External updates do not notify the server. So it queries a session's worker before a turn begins or continues, where a
slow worker delays only its own turns. It queries all workers once a second while turns run, or when one reports a
change. Only then is a worker with other weights fenced.

A label without a number gets the position at which the server first saw it. The store keeps it, so that it means the
same on every worker and after a restart.

While a weight update is half done, callers wait here, as long as at a closed gate.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from msgspec import structs

from harness.engines.base import TokenProvider
from harness.engines.pool.workers import fence_left_behind
from harness.errors import EngineError, EngineUnavailable, StoreError, UnknownWeightVersion, WeightsUnsettled
from harness.machine.deadlines import Deadline, within
from harness.samples.versions import LabelOrder, is_unsettled, is_version, known_version
from harness.server.http.connection import ClientConnection
from harness.server.store.base import SessionStore
from harness.sessions.weights.weight_update import ExpectedWeights, LiveWeights
from harness.types import GenerationResult, PromptLogprobs, VersionSpan

_Labeled = TypeVar("_Labeled", VersionSpan, PromptLogprobs)

_LOOK_S = 1.0
_EVERY_S = 1.0
_AGAIN_S = 0.25


@dataclass(slots=True)
class _Question:
    answered: asyncio.Event | None = None
    """Set when the current query ends. Callers that came after its start wait for the next one."""
    begun: int = 0
    ended: int = 0


class LiveVersion:
    """The version that `engine` serves."""

    def __init__(self, engine: TokenProvider, store: SessionStore, *, patience_s: float) -> None:
        self._engine = engine
        self._store = store
        self._order = LabelOrder()
        self._kept: set[str] = set()
        self._patience_s = patience_s
        self._to_all = _Question()
        self._to_workers = {"": self._to_all}  # a single engine has no name
        self._turns = 0
        self._has_turns = asyncio.Event()
        self._has_news = asyncio.Event()

    @property
    def is_unsettled(self) -> bool:
        """True if a weight update is running or failed."""
        return is_unsettled(self._engine.weight_version)

    @property
    def version(self) -> int | None:
        """Policy version for the next token, if known."""
        return self._order.find(self._engine.weight_version)

    def worker_of(self, session_id: str) -> TokenProvider:
        """Return the engine for the session's next request, or the pool if none serves."""
        workers = self._engine.workers
        name = workers.next_for(session_id)
        return self._engine if name is None else workers.providers[name]

    def version_for(self, session_id: str) -> int | None:
        """Return the policy version for the session's next token, if known."""
        return self._order.find(self.worker_of(session_id).weight_version)

    async def restore(self) -> None:
        """Load the labels of earlier servers. Raises `StoreError`."""
        labels = await self._store.load_labels()
        self._order, self._kept = LabelOrder(labels), set(labels)
        self._engine.workers.count_labels_by(self._order)

    async def number_labels(self, result: GenerationResult) -> GenerationResult:
        """Add the policy version to labels without a number. Raises `StoreError`."""
        scoring = result.prompt_logprobs
        labels = [span.version for span in result.version_spans] + ([] if scoring is None else [scoring.version])
        if all(known_version(label) is not None for label in labels):
            return result
        spans = tuple([await self.number_label(span) for span in result.version_spans])
        scoring = scoring and await self.number_label(scoring)
        return structs.replace(result, version_spans=spans, prompt_logprobs=scoring)

    async def number_label(self, labeled: _Labeled) -> _Labeled:
        """Add the policy version to one label. Raises `StoreError`."""
        if known_version(labeled.version) is not None:
            return labeled
        return replace(labeled, number=await self._see(labeled.version))

    def number_known(self, spans: Sequence[VersionSpan]) -> list[VersionSpan]:
        """Return the leading `spans` whose labels have a version."""
        known = itertools.takewhile(
            lambda span: known_version(span.version) is not None or span.version in self._kept, spans
        )
        return [
            span if known_version(span.version) is not None else replace(span, number=self._order.see(span.version))
            for span in known
        ]

    async def _see(self, label: str) -> int:
        number = self._order.see(label)
        if label not in self._kept:
            await self._store.keep_label(label, number)
            self._kept.add(label)
        return number

    async def look(self) -> None:
        """Query every worker, starting after this call."""
        await self._ask(self._engine, self._to_all)

    async def look_for(self, session_id: str) -> None:
        """Query the session's next worker, starting after this call."""
        name, worker = self._engine.workers.next_for(session_id), self.worker_of(session_id)
        before = worker.weight_version
        await self._ask(worker, self._to_all if name is None else self._to_workers.setdefault(name, _Question()))
        if worker.weight_version != before:
            self._has_news.set()
        if is_unsettled(worker.weight_version):  # the session may move to another worker
            await self.look()

    async def _ask(self, engine: TokenProvider, to: _Question) -> None:
        # One query at a time. Later callers share the next one, which starts after their call, so its answer is fresh.
        # An engine that does not answer costs a second, and the known version stays.
        wanted = to.begun + 1
        while to.ended < wanted:
            if to.answered is not None:
                await to.answered.wait()
                continue
            to.answered = answered = asyncio.Event()
            to.begun += 1
            question = to.begun
            try:
                with suppress(EngineError, TimeoutError), Deadline(_LOOK_S):
                    await engine.read_version()
                with suppress(UnknownWeightVersion, StoreError):  # callers that need the number get the error
                    await self._see(engine.weight_version)
                to.ended = question
            finally:  # the querying task may be cancelled: then a waiting task takes over
                to.answered = None
                answered.set()

    async def wait_for_weights(
        self, client: ClientConnection, session_id: str, is_wanted: Callable[[], bool], *, must_work: bool = False
    ) -> None:
        """Return once the session's engine has a version, or `is_wanted` is false.

        `must_work` also waits for the end of a pause: a paused engine would take a request under the old weights and
        answer it under the new ones. Raises `WeightsUnsettled`, `EngineUnavailable`, or the reason for a dismissal.
        """
        try:
            with client.patience(self._patience_s):
                while is_wanted():
                    if not (must_work and (await self.worker_of(session_id).health()).paused):
                        await self.look_for(session_id)
                        if not is_unsettled(self.worker_of(session_id).weight_version):
                            return
                    with client.held():
                        await asyncio.sleep(_AGAIN_S)
        except TimeoutError:
            if not self.is_unsettled:
                raise EngineUnavailable(f"the engine has been paused for more than {self._patience_s:g} s") from None
            raise WeightsUnsettled(
                f"the engine carries the label {self._engine.weight_version!r}: an update of its weights is under way"
                f" or broke off, and none has succeeded within {self._patience_s:g} s"
            ) from None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Count a turn within the block."""
        self._turns += 1
        self._has_turns.set()
        try:
            yield
        finally:
            self._turns -= 1
            if not self._turns:
                self._has_turns.clear()

    async def follow(self) -> None:
        """Query every worker while turns run, forever."""
        while True:
            await self._has_turns.wait()
            self._has_news.clear()
            await self.look()
            await within(_EVERY_S, self._has_news.wait())


async def check_weights(engine: TokenProvider, expected: ExpectedWeights) -> LiveWeights:
    """Query every worker, and fence those without the `expected` version.

    If no worker has it, none is fenced: old weights are better than none. A single engine is never fenced.
    """
    with suppress(EngineError):  # the other workers' answers count; a single engine keeps its known version
        await engine.read_version()
    if any(is_version(worker.weight_version, expected.version) for worker in engine.workers):
        fence_left_behind(engine.workers, expected.version)
    alone = engine.capabilities.engine
    return LiveWeights(
        expected.version,
        {worker.name or alone: worker.weight_version for worker in engine.workers if not worker.fence},
        {worker.name: worker.weight_version for worker in engine.workers if worker.fence},
    )

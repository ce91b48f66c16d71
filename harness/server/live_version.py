"""The weights that the engine of a server serves now, for all who decide by them.

Weights change behind a server's back: an update is driven from outside, by somebody who need not know that the server
exists. So the engine is asked before a turn begins, before a turn that was cut short goes on, and once a second while
turns run; its replies say it as well. Nothing depends on who else asks: `GET /health` does not.

Of a pool, a turn asks the worker that its session goes to, and waits for no other: a slow one delays its own turns.
All workers are asked together once a second, and at once when one of them says something new: only then is one that
has other weights than the rest kept from serving.

There is at most one question at a time to each. Those who come while one is under way share the next one, which begins
after they came, so its answer is not of before. An engine that does not answer costs a second; what was known still
counts.

Labels that are no numbers have the place at which this server saw them first, kept in its store, so that they mean the
same for every worker and after a restart.

An engine whose weights are half-way through an update serves nobody, and a paused one should be asked for nothing that
depends on its version. Those who want a token wait here, as long as a closed gate would hold them.

After an update from outside its driver asks here what is served (`check_weights`): what the providers of this process
believe is refreshed, and a worker that the update left behind serves nobody until a later one has reached it.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from harness.engines.base import TokenProvider
from harness.engines.pool.workers import fence_left_behind
from harness.errors import EngineError, EngineUnavailable, StoreError, UnknownWeightVersion, WeightsUnsettled
from harness.samples.versions import LabelOrder, is_unsettled, is_version, known_version
from harness.server.http.connection import ClientConnection
from harness.sessions.weights.weight_update import ExpectedWeights, LiveWeights
from harness.store.base import SessionStore
from harness.types import GenerationResult, PromptLogprobs, VersionSpan

_Labeled = TypeVar("_Labeled", VersionSpan, PromptLogprobs)

_LOOK_S = 1.0
_AGAIN_S = 0.25


@dataclass(slots=True)
class _Question:
    """The questions to one worker, or to all of them."""

    answered: asyncio.Event | None = None
    """Of the one that is under way; it may have been answered before you came, so you wait for the next."""
    begun: int = 0
    ended: int = 0


class LiveVersion:
    """The version that `engine` serves.

    Args:
        store: Keeps which version a label stands for that does not say it.
        patience_s: How long somebody waits for an update to succeed.
        every_s: How often the engine is asked while turns run.
    """

    def __init__(self, engine: TokenProvider, store: SessionStore, *, patience_s: float, every_s: float = 1.0) -> None:
        self._engine = engine
        self._store = store
        self._order = LabelOrder()
        self._kept: set[str] = set()
        self._patience_s = patience_s
        self._every_s = every_s
        self._to_all = _Question()
        self._to_workers = {"": self._to_all}  # an engine on its own has no name, and is all there is
        self._turns = 0
        self._has_turns = asyncio.Event()
        self._has_news = asyncio.Event()

    @property
    def is_unsettled(self) -> bool:
        """An update of the weights is under way or broke off."""
        return is_unsettled(self._engine.weight_version)

    @property
    def version(self) -> int | None:
        """The policy version that would sample the next token, as far as it is known."""
        return self._order.find(self._engine.weight_version)

    def worker_of(self, session_id: str) -> TokenProvider:
        """The engine that the session's next request goes to, as things stand; the pool itself while none serves."""
        name = self._engine.workers.next_for(session_id)
        return self._engine if name is None else self._engine.workers.providers[name]

    def version_for(self, session_id: str) -> int | None:
        """The policy version that would sample the session's next token, as far as it is known."""
        return self._order.find(self.worker_of(session_id).weight_version)

    async def restore(self) -> None:
        """Count labels as an earlier server did. Raises `StoreError`."""
        labels = await self._store.load_labels()
        self._order, self._kept = LabelOrder(labels), set(labels)
        self._engine.workers.count_labels_by(self._order)

    async def number_labels(self, result: GenerationResult) -> GenerationResult:
        """`result` with the policy version of every label that does not say it. Raises `StoreError`."""
        scoring = result.prompt_logprobs
        labels = [span.version for span in result.version_spans] + ([] if scoring is None else [scoring.version])
        if all(known_version(label) is not None for label in labels):
            return result
        spans = tuple([await self.number_label(span) for span in result.version_spans])
        scoring = scoring and await self.number_label(scoring)
        return replace(result, version_spans=spans, prompt_logprobs=scoring)

    async def number_label(self, labeled: _Labeled) -> _Labeled:
        """`labeled` with the policy version of its label, unless the label says it. Raises `StoreError`."""
        if known_version(labeled.version) is not None:
            return labeled
        return replace(labeled, number=await self._see(labeled.version))

    def number_known(self, spans: Sequence[VersionSpan]) -> list[VersionSpan]:
        """The first of `spans` whose labels have a version by now: those that need no wait."""
        known = itertools.takewhile(
            lambda span: known_version(span.version) is not None or span.version in self._kept, spans
        )
        return [
            span if known_version(span.version) is not None else replace(span, number=self._order.see(span.version))
            for span in known
        ]

    async def _see(self, label: str) -> int:
        """The version of `label`, which means the same after a restart."""
        number = self._order.see(label)
        if label not in self._kept:
            await self._store.keep_label(label, number)
            self._kept.add(label)
        return number

    async def look(self) -> None:
        """Ask every worker, with a question that begins from now on."""
        await self._ask(self._engine, self._to_all)

    async def look_for(self, session_id: str) -> None:
        """Ask the worker that the session's next request goes to, with a question that begins from now on."""
        name, worker = self._engine.workers.next_for(session_id), self.worker_of(session_id)
        before = worker.weight_version
        await self._ask(worker, self._to_all if name is None else self._to_workers.setdefault(name, _Question()))
        if worker.weight_version != before:
            self._has_news.set()
        if is_unsettled(worker.weight_version):  # another one may have to serve it
            await self.look()

    async def _ask(self, engine: TokenProvider, to: _Question) -> None:
        wanted = to.begun + 1
        while to.ended < wanted:
            if to.answered is not None:
                await to.answered.wait()
                continue
            to.answered = answered = asyncio.Event()
            to.begun += 1
            question = to.begun
            try:
                with suppress(EngineError, TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await engine.read_version()
                with suppress(UnknownWeightVersion, StoreError):  # whoever needs the number is told
                    await self._see(engine.weight_version)
                to.ended = question
            finally:  # whoever asks may be cancelled: then one of those who wait asks
                to.answered = None
                answered.set()

    async def wait_for_weights(
        self, client: ClientConnection, session_id: str, is_wanted: Callable[[], bool], *, must_work: bool = False
    ) -> None:
        """Return when the session's engine has been asked and has a version, or nothing is wanted any more.

        `must_work` also waits for the end of a pause: what is asked of a paused engine is asked about the weights
        before it, and answered by those after it. Raises `WeightsUnsettled` or `EngineUnavailable` when it takes too
        long, and why the client was dismissed.
        """
        try:
            async with client.patience(self._patience_s):
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
        """A turn runs inside the block."""
        self._turns += 1
        self._has_turns.set()
        try:
            yield
        finally:
            self._turns -= 1
            if not self._turns:
                self._has_turns.clear()

    async def follow(self) -> None:
        """Ask every worker again and again while turns run, and when one has news; for the life of the server."""
        while True:
            await self._has_turns.wait()
            self._has_news.clear()
            await self.look()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._every_s):
                    await self._has_news.wait()


async def check_weights(engine: TokenProvider, expected: ExpectedWeights) -> LiveWeights:
    """Ask every worker for its version; those of a pool that have another one than `expected` are fenced.

    A pool in which no worker has it is left as it is: better the old weights than none. An engine on its own cannot be
    fenced.
    """
    with suppress(EngineError):  # what the others say counts, and nothing is heard from an engine of one's own
        await engine.read_version()
    if any(is_version(worker.weight_version, expected.version) for worker in engine.workers):
        fence_left_behind(engine.workers, expected.version)
    alone = engine.capabilities.engine
    return LiveWeights(
        expected.version,
        {worker.name or alone: worker.weight_version for worker in engine.workers if not worker.fence},
        {worker.name: worker.weight_version for worker in engine.workers if worker.fence},
    )

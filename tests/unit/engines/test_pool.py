"""A pool of engines: sessions keep their worker, dead workers are passed over, control reaches everybody."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from harness.engines.base import LogprobScale, PauseMode, TokenProvider
from harness.engines.pool.pool import EnginePool
from harness.engines.pool.workers import MISSED_UPDATE, UNSETTLED
from harness.engines.scripted import Script, ScriptedEngine, ScriptStep
from harness.errors import (
    EngineConnectionLost,
    EngineError,
    EngineRejected,
    EngineReplyInvalid,
    EngineUnavailable,
    ScenarioError,
)
from harness.types import FinishReason, GenerationDelta, GenerationRequest, GenerationResult, SamplingParams, as_ids
from tests.builders import toy_tokenizer
from tests.fake_engines.fake_server import UNFIT_WEIGHTS, FakeServer, serving
from tests.fake_engines.lies import Lie
from tests.fake_engines.providers import SLOWLY, fake_provider, make_fake, scripted_engine
from tests.session_servers.served import eventually

PROMPT = as_ids([40, 41, 42])
PARAMS = SamplingParams(max_new_tokens=3)
LONG = SamplingParams(max_new_tokens=400)
FAKE_CACHED_TOKENS = 3
"""What the fake SGLang says of every prompt."""


@dataclass
class Pooled:
    """A pool and the servers under it."""

    pool: EnginePool
    fakes: list[FakeServer]

    async def ask(self, session_id: str | None = None, params: SamplingParams = PARAMS) -> GenerationResult:
        """One generation."""
        return await self.pool.generate(
            GenerationRequest(PROMPT, params, request_id=uuid4().hex, session_id=session_id)
        )

    def served(self) -> list[int]:
        """How many generations each server has been asked for."""
        return [len(fake.bodies) for fake in self.fakes]


@asynccontextmanager
async def pooled(count: int = 2, step: ScriptStep | None = None, **limits: Any) -> AsyncIterator[Pooled]:
    """A pool of fake SGLang servers that say `step`."""
    async with AsyncExitStack() as stack:
        fakes = [make_fake("sglang", scripted_engine(step or ScriptStep(text="Hello there."))) for _ in range(count)]
        for fake in fakes:
            await stack.enter_async_context(serving(fake, notices_disconnects=False))
        workers: list[TokenProvider] = [
            fake_provider(fake, logprob_scale=LogprobScale.AFTER_TEMPERATURE) for fake in fakes
        ]
        yield Pooled(await stack.enter_async_context(EnginePool(workers, **limits)), fakes)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_worker_that_cannot_serve_is_passed_over(stream: bool):
    """The request is served by the other worker, and the next one does not even try the first."""
    async with pooled() as under:
        under.fakes[0].lie = Lie.STATUS_503
        for _ in range(3):
            if stream:
                *_, result = [
                    p async for p in under.pool.stream(GenerationRequest(PROMPT, PARAMS, request_id=uuid4().hex))
                ]
            else:
                result = await under.ask()
            assert result.output_ids.size == 3

        assert under.served() == [1, 3]


async def test_a_session_moves_when_its_worker_is_gone():
    """Ids of the whole prompt go with every request, so any worker can continue."""
    async with pooled() as under:
        await under.ask("a")
        home = under.served().index(1)
        under.fakes[home].lie = Lie.STATUS_503
        await under.ask("a")
        under.fakes[home].lie = Lie.NONE
        await under.ask("a")

        assert under.served()[1 - home] == 2


async def test_a_first_turn_that_is_served_elsewhere_moves_no_session():
    """Nothing of the session is in the cache of the worker that was asked first; later turns that move are counted."""
    async with pooled() as under:
        under.pool.workers.observe(counted := Counted())
        under.fakes[0].lie = Lie.STATUS_503
        await under.ask("a")
        first, under.fakes[0].lie, under.fakes[1].lie = list(counted.recomputed), Lie.NONE, Lie.STATUS_503
        await under.ask("a")

        assert under.served() == [2, 2]
        assert first == []
        assert counted.recomputed == [0]


async def test_a_lie_does_not_make_a_request_move():
    """Only a worker that did not serve is passed over; what one has sampled is not sampled again elsewhere."""
    async with pooled() as under:
        under.fakes[0].lie = under.fakes[1].lie = Lie.WRONG_COUNT
        with pytest.raises(EngineReplyInvalid):
            await under.ask()

        assert sum(under.served()) == 1


class Breaking(ScriptedEngine):
    """Hands over its first token, and then says that it never served the request."""

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        async with aclosing(self.stream(request)) as pieces:
            first = await anext(pieces)
        assert isinstance(first, GenerationDelta)
        assert request.on_delta is not None
        request.on_delta(first)
        raise EngineUnavailable("not available")


async def test_a_request_of_which_something_has_arrived_does_not_move():
    """Whatever its provider says of it: another worker would sample behind tokens that somebody has already (I5)."""
    arrived: list[GenerationDelta] = []
    slowly = Script((ScriptStep(text="Hello there.", token_delay_s=0.001),))
    workers = [Breaking(toy_tokenizer(), slowly), ScriptedEngine(toy_tokenizer(), slowly)]
    async with EnginePool(workers) as pool:
        with pytest.raises(EngineUnavailable) as caught:
            await pool.generate(GenerationRequest(PROMPT, PARAMS, request_id=uuid4().hex, on_delta=arrived.append))

        assert [len(each.played) for each in workers] == [1, 0]
    assert caught.value.may_have_sampled
    assert [each.output_ids.size for each in arrived] == [1]


async def test_when_nobody_can_serve_the_last_failure_is_raised():
    async with pooled() as under:
        for fake in under.fakes:
            fake.lie = Lie.STATUS_503
        with pytest.raises(EngineUnavailable, match="503"):
            await under.ask()

        assert under.served() == [1, 1]


async def test_control_that_fails_somewhere_says_where():
    """The others did what they were told; the error is of the type that the failures share."""
    async with pooled(3) as under:
        await under.pool.update_weights(Path("/weights/b"), "1")
        with pytest.raises(EngineError, match=r"3 of 3 workers failed to update to version 2: worker 0: .*shapes"):
            await under.pool.update_weights(UNFIT_WEIGHTS, "2")

        assert [fake.engine.weight_version for fake in under.fakes] == ["updating-2"] * 3
        assert [status.fence for status in under.pool.workers] == [UNSETTLED] * 3


async def test_a_worker_that_went_away_does_not_keep_the_others_from_control():
    """A pause reaches the workers that are there, and its failure names the one that is not."""
    gone = make_fake("sglang", scripted_engine())
    async with pooled(1) as under, AsyncExitStack() as its_server:
        await its_server.enter_async_context(serving(gone, notices_disconnects=False))
        await under.pool.workers.join("gone", fake_provider(gone, logprob_scale=LogprobScale.AFTER_TEMPERATURE))
        await its_server.aclose()
        with pytest.raises(EngineUnavailable, match="1 of 2 workers failed to pause: worker gone"):
            await under.pool.pause(PauseMode.ABORT)

        assert under.fakes[0].paths[-1] == "/pause_generation"
        health = await under.pool.health()
        assert (health.ready, health.paused) == (True, True)
        assert "gone: NOT ready" in health.detail


async def test_workers_of_different_models_are_refused():
    async with AsyncExitStack() as stack:
        fakes = [make_fake("sglang", scripted_engine()) for _ in range(2)]
        for fake in fakes:
            await stack.enter_async_context(serving(fake, notices_disconnects=False))
        scales = [LogprobScale.RAW, LogprobScale.AFTER_TEMPERATURE]
        pool = EnginePool([fake_provider(f, logprob_scale=s) for f, s in zip(fakes, scales, strict=True)])
        with pytest.raises(ScenarioError, match="logprob_scale is after_temperature and raw"):
            await stack.enter_async_context(pool)


# Workers that come, go, and are kept from serving


@dataclass
class Counted:
    """What a pool tells its observer."""

    recomputed: list[int] = field(default_factory=list)
    serving: int = 0

    def session_moved(self, recomputed_tokens: int) -> None:
        self.recomputed.append(recomputed_tokens)

    def workers_serving(self, count: int) -> None:
        self.serving = count


@asynccontextmanager
async def newcomer(**options: Any) -> AsyncIterator[tuple[FakeServer, TokenProvider]]:
    """A server that is in no pool, and its provider."""
    fake = make_fake("sglang", scripted_engine(ScriptStep(text="Hello there.")))
    async with serving(fake, notices_disconnects=False):
        yield fake, fake_provider(fake, **{"logprob_scale": LogprobScale.AFTER_TEMPERATURE} | options)


async def test_a_worker_with_old_weights_serves_nobody_until_it_has_caught_up():
    """It joined after an update that it knows nothing of."""
    counted = Counted()
    async with pooled(1) as under, newcomer() as (fake, worker):
        under.pool.workers.observe(counted)
        await under.pool.update_weights(Path("/weights/b"), "7")
        await under.pool.workers.join("new", worker)
        await asyncio.gather(*(under.ask(f"session {i}") for i in range(4)))
        assert (len(fake.bodies), counted.serving) == (0, 1)

        await fake.engine.update_weights(Path("/weights/b"), "7")
        await under.pool.probe()
        await asyncio.gather(*(under.ask(f"session {i + 4}") for i in range(4)))
        assert (len(fake.bodies) > 0, counted.serving) == (True, 2)


class Reluctant(ScriptedEngine):
    """Takes its time with new weights, and then refuses them."""

    def __init__(self) -> None:
        super().__init__(toy_tokenizer())
        self.asked = asyncio.Event()
        self.refuses = asyncio.Event()

    async def update_weights(self, path: Path, version: str) -> None:
        self.asked.set()
        await self.refuses.wait()
        raise EngineRejected("the shapes differ")


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["refused", "cancelled"])
async def test_a_worker_that_missed_an_update_serves_nobody_from_then_on(is_cancelled: bool):
    """The others have the new weights; which ones a session gets must not depend on when somebody probes."""
    worker = Reluctant()
    async with EnginePool([scripted_engine(), worker]) as pool:
        updating = asyncio.create_task(pool.update_weights(Path("/weights/b"), "1"))
        await worker.asked.wait()
        updating.cancel() if is_cancelled else worker.refuses.set()
        with pytest.raises(asyncio.CancelledError if is_cancelled else EngineRejected):
            await updating

        assert [status.fence for status in pool.workers] == ["", MISSED_UPDATE]
        assert pool.weight_version == "1"


async def test_a_worker_that_may_serve_again_does_not_do_so_with_old_weights():
    """It was silent while another one was updated past the pool; that it answers now is not enough."""
    workers = [scripted_engine(), scripted_engine()]
    async with EnginePool(workers) as pool:
        pool.workers.fence("1", "it does not answer")
        await workers[0].update_weights(Path("/weights/b"), "1")
        await pool.probe()
        pool.workers.unfence("1")
        assert [status.fence for status in pool.workers] == ["", MISSED_UPDATE]

        await workers[1].update_weights(Path("/weights/b"), "1")
        await pool.probe()
        assert [status.fence for status in pool.workers] == ["", ""]


async def test_scores_go_to_the_worker_that_has_the_session():
    """Anybody else would have to compute its whole prefix again."""
    async with pooled(3) as under:
        for session in ("a", "b", "c", "d"):
            await under.ask(session)
            before = under.served()
            for _ in range(3):
                await under.pool.score(PROMPT, start=1, session_id=session)
            home = under.pool._placement.place_of(session).worker.name
            assert [after - was for after, was in zip(under.served(), before, strict=True)] == [
                3 * (str(index) == home) for index in range(3)
            ]


async def test_a_fenced_worker_gives_its_sessions_away_and_still_obeys():
    """The move is counted, with what the other worker had to compute again."""
    counted = Counted()
    async with pooled() as under:
        under.pool.workers.observe(counted)
        await under.ask("a")
        home = under.served().index(1)
        under.pool.workers.fence(str(home), "its weights are lost")
        await under.ask("a")
        await under.pool.abort(None)

        assert under.served()[home] == 1
        assert under.fakes[home].paths[-1] == "/abort_request"
        assert counted.recomputed == [PROMPT.size - FAKE_CACHED_TOKENS]
        under.pool.workers.unfence(str(home))
        assert counted.serving == 2


async def test_a_retired_worker_finishes_what_it_has_and_gets_nothing_more():
    """Its connection stays until its last request has ended."""
    async with pooled(step=SLOWLY) as under:
        running = asyncio.create_task(under.ask("a", LONG))
        await at_worker(under, 1)
        home = next(status.name for status in under.pool.workers if status.in_flight)
        await under.pool.workers.retire(home, "scaled down")
        await under.ask("b")

        assert [status.name for status in under.pool.workers] == [str(1 - int(home))]
        assert (await running).output_ids.size == LONG.max_new_tokens
        assert under.served() == [1, 1]


async def test_a_worker_that_is_left_at_once_loses_its_requests():
    """They fail as a lost connection; nobody waits for a machine that is gone."""
    async with pooled(step=SLOWLY) as under:
        running = asyncio.create_task(under.ask("a", LONG))
        await at_worker(under, 1)
        home = next(status.name for status in under.pool.workers if status.in_flight)
        await under.pool.workers.retire(home, "it does not answer", at_once=True)

        with pytest.raises(EngineConnectionLost):
            await running


async def test_a_retired_worker_is_left_when_the_last_to_be_placed_there_never_came():
    """Its request was cancelled in the tick that gave it the worker."""
    async with pooled(2) as under:
        provider = under.pool.workers.providers["0"]
        under.pool.workers.fence("0", "not yet")
        under.pool.workers.fence("1", "not yet")
        waiting = asyncio.create_task(under.ask())
        while not under.pool.waiting:
            await asyncio.sleep(0)

        under.pool.workers.unfence("0")
        waiting.cancel()
        await under.pool.workers.retire("0", "scaled down")
        with pytest.raises(asyncio.CancelledError):
            await waiting

        with pytest.raises(EngineUnavailable, match="is not connected"):
            await provider.score(PROMPT, start=1)


# Limits


async def test_a_request_does_not_wait_for_ever():
    """The error says what every worker was busy with."""
    async with pooled(1, step=SLOWLY, limit=1, queue_timeout_s=0.2) as under:
        running = asyncio.create_task(under.ask("a", LONG))
        await at_worker(under, 1)
        with pytest.raises(EngineUnavailable, match=r"no worker had room .* within 0.2 s \(0: 1 in flight\)"):
            await under.ask("b")

        await under.pool.abort(None)
        assert (await running).finish_reason is FinishReason.ABORT


async def test_who_gives_up_waiting_gives_up_the_place():
    """The next one gets it; a place that was granted and not wanted any more is free again."""
    async with pooled(1, step=SLOWLY, limit=1) as under:
        running = asyncio.create_task(under.ask("a", LONG))
        await at_worker(under, 1)
        waiting = [asyncio.create_task(under.ask(name)) for name in "bcd"]
        await eventually(lambda: under.pool.waiting == 3)
        waiting[0].cancel()
        await under.fakes[0].engine.abort(None)
        await running
        waiting[1].cancel()
        result = await waiting[2]

        assert result.output_ids.size == 3
        assert (result.worker, result.queued_s > (await running).queued_s) == ("0", True)
        assert (under.pool.waiting, [status.in_flight for status in under.pool.workers]) == (0, [0])
        assert [task.cancelled() for task in waiting[:2]] == [True, True]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_request_that_waits_can_be_aborted(stream: bool):
    """A drain need not wait for a queue: it ends at once with nothing sampled, and no worker ever hears of it."""
    async with pooled(1, step=SLOWLY, limit=1) as under:
        running = asyncio.create_task(under.ask("a", LONG))
        await at_worker(under, 1)
        request_id = uuid4().hex

        async def wait() -> GenerationResult:
            if stream:
                [result] = [
                    p async for p in under.pool.stream(GenerationRequest(PROMPT, PARAMS, request_id=request_id))
                ]
                return result
            return await under.pool.generate(GenerationRequest(PROMPT, PARAMS, request_id=request_id))

        waiting = asyncio.create_task(wait())
        await eventually(lambda: under.pool.waiting == 1)
        assert await under.pool.abort(request_id) == 1
        result = await waiting

        assert (result.finish_reason, result.output_ids.size) == (FinishReason.ABORT, 0)
        assert under.served() == [1]
        also = asyncio.create_task(under.ask("b"))
        await eventually(lambda: under.pool.waiting == 1)
        assert await under.pool.abort(None) == 2
        assert {(await task).finish_reason for task in (running, also)} == {FinishReason.ABORT}


async def at_worker(under: Pooled, count: int) -> None:
    """Return once the workers have been asked for that many generations."""
    await eventually(lambda: sum(under.served()) >= count)


async def test_a_stream_without_a_piece_ends_and_gives_its_place_back():
    """A broken provider is no error of the pool's; a reader misses the result as it does without a pool."""

    class Silent(ScriptedEngine):
        async def stream(self, request: GenerationRequest) -> AsyncIterator[GenerationResult]:
            return
            yield

    async with EnginePool([Silent(toy_tokenizer(), Script((SLOWLY,)))]) as pool:
        pieces = [piece async for piece in pool.stream(GenerationRequest(PROMPT, PARAMS, request_id=uuid4().hex))]
        assert (pieces, [worker.in_flight for worker in pool.workers]) == ([], [0])

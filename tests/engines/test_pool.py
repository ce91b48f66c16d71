"""A pool of engines: sessions keep their worker, dead workers are passed over, control reaches everybody."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest

from harness.engines.base import LogprobScale, PauseMode, TokenProvider
from harness.engines.pool import EnginePool
from harness.engines.scripted import Step
from harness.errors import EngineError, EngineReplyInvalid, EngineUnavailable, ScenarioError
from harness.types import FinishReason, GenerationResult, SamplingParams, as_ids
from tests.engines.fake_server import UNFIT_WEIGHTS, FakeServer, serving
from tests.engines.lies import Lie
from tests.engines.providers import SLOWLY, fake_provider, make_fake, scripted_engine

PROMPT = as_ids([40, 41, 42])
PARAMS = SamplingParams(max_new_tokens=3)
LONG = SamplingParams(max_new_tokens=400)


@dataclass
class Pooled:
    """A pool and the servers under it."""

    pool: EnginePool
    fakes: list[FakeServer]

    async def ask(self, session_id: str | None = None, params: SamplingParams = PARAMS) -> GenerationResult:
        """One generation."""
        return await self.pool.generate(PROMPT, params, request_id=uuid4().hex, session_id=session_id)

    def served(self) -> list[int]:
        """How many generations each server has been asked for."""
        return [len(fake.bodies) for fake in self.fakes]


@asynccontextmanager
async def pooled(count: int = 2, step: Step | None = None) -> AsyncIterator[Pooled]:
    """A pool of fake SGLang servers that say `step`."""
    async with AsyncExitStack() as stack:
        fakes = [make_fake("sglang", scripted_engine(step or Step(text="Hello there."))) for _ in range(count)]
        for fake in fakes:
            await stack.enter_async_context(serving(fake, notices_disconnects=False))
        workers: list[TokenProvider] = [
            fake_provider(fake, logprob_scale=LogprobScale.AFTER_TEMPERATURE) for fake in fakes
        ]
        yield Pooled(await stack.enter_async_context(EnginePool(workers)), fakes)


async def test_a_session_keeps_its_worker():
    """The worker that has the cache of a session's prefix serves its next turn too."""
    async with pooled() as under:
        for _ in range(3):
            await under.ask("a")
        for _ in range(2):
            await under.ask("b")

        assert sorted(under.served()) == [2, 3]


async def test_new_sessions_go_where_there_is_least_to_do():
    """Four sessions at once on two workers are two each."""
    async with pooled() as under:
        await asyncio.gather(*(under.ask(f"session {i}") for i in range(4)))

        assert under.served() == [2, 2]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_worker_that_cannot_serve_is_passed_over(stream: bool):
    """The request is served by the other worker, and the next one does not even try the first."""
    async with pooled() as under:
        under.fakes[0].lie = Lie.STATUS_503
        for _ in range(3):
            if stream:
                *_, result = [p async for p in under.pool.stream(PROMPT, PARAMS, request_id=uuid4().hex)]
            else:
                result = await under.ask()
            assert result.output_ids.size == 3

        assert under.served() == [1, 3]


async def test_a_session_moves_when_its_worker_is_gone():
    """Ids of the whole prompt go with every request, so any worker can go on."""
    async with pooled() as under:
        await under.ask("a")
        home = under.served().index(1)
        under.fakes[home].lie = Lie.STATUS_503
        await under.ask("a")
        under.fakes[home].lie = Lie.NONE
        await under.ask("a")

        assert under.served()[1 - home] == 2


async def test_a_lie_does_not_make_a_request_move():
    """Only a worker that did not serve is passed over; what one has sampled is not sampled again elsewhere."""
    async with pooled() as under:
        under.fakes[0].lie = under.fakes[1].lie = Lie.WRONG_COUNT
        with pytest.raises(EngineReplyInvalid):
            await under.ask()

        assert sum(under.served()) == 1


async def test_when_nobody_can_serve_the_last_failure_is_raised():
    """Every worker was offered the request once."""
    async with pooled() as under:
        for fake in under.fakes:
            fake.lie = Lie.STATUS_503
        with pytest.raises(EngineUnavailable, match="503"):
            await under.ask()

        assert under.served() == [1, 1]


async def test_an_abort_of_all_reaches_every_worker():
    """Generations on both workers end as ABORT."""
    async with pooled(step=SLOWLY) as under:
        tasks = [asyncio.ensure_future(under.ask(params=LONG)) for _ in range(4)]
        await asyncio.sleep(0.2)

        assert await under.pool.abort(None) == 4
        assert {result.finish_reason for result in await asyncio.gather(*tasks)} == {FinishReason.ABORT}


async def test_control_that_fails_somewhere_says_where():
    """The others did what they were told; the error is of the type that the failures share."""
    async with pooled(3) as under:
        await under.pool.update_weights(Path("/weights/b"), "1")
        with pytest.raises(EngineError, match=r"3 of 3 workers failed to update to version 2: worker 0: .*shapes"):
            await under.pool.update_weights(UNFIT_WEIGHTS, "2")

        assert under.pool.weight_version == "1"
        assert [fake.engine.weight_version for fake in under.fakes] == ["1", "1", "1"]


async def test_a_worker_that_went_away_does_not_keep_the_others_from_control():
    """A pause reaches the workers that are there, and its failure names the one that is not."""
    gone = make_fake("sglang", scripted_engine())
    async with pooled(1) as under, AsyncExitStack() as its_server:
        await its_server.enter_async_context(serving(gone, notices_disconnects=False))
        await under.pool.join("gone", fake_provider(gone, logprob_scale=LogprobScale.AFTER_TEMPERATURE))
        await its_server.aclose()
        with pytest.raises(EngineUnavailable, match="1 of 2 workers failed to pause: worker gone"):
            await under.pool.pause(PauseMode.ABORT)

        assert under.fakes[0].paths[-1] == "/pause_generation"
        health = await under.pool.health()
        assert (health.ready, health.paused) == (True, True)
        assert "gone: NOT ready" in health.detail


async def test_workers_of_different_models_are_refused():
    """A session could not move between them."""
    async with AsyncExitStack() as stack:
        fakes = [make_fake("sglang", scripted_engine()) for _ in range(2)]
        for fake in fakes:
            await stack.enter_async_context(serving(fake, notices_disconnects=False))
        scales = [LogprobScale.RAW, LogprobScale.AFTER_TEMPERATURE]
        pool = EnginePool([fake_provider(f, logprob_scale=s) for f, s in zip(fakes, scales, strict=True)])
        with pytest.raises(ScenarioError, match="logprob_scale is after_temperature and raw"):
            await stack.enter_async_context(pool)

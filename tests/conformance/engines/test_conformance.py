"""What every token provider promises, tested on each of them: scripted, local, real SGLang, real vLLM, fakes and pools.

The promises are those of `harness.engines.base`. Where an engine cannot keep one, what it does instead is asserted; see
`providers.Expectations`. Engines run at any speed, two at once on two cores included: tests wait for what they
interfere with, and a deadline only ends what hangs.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import pytest_asyncio

from harness.engines.base import CountsTokens, EngineCount, EngineHealth, LogprobScale, PauseMode
from harness.engines.huggingface import HuggingFaceTokenProvider
from harness.engines.logprob_scale import measure_scale
from harness.errors import EngineRejected, EngineReplyInvalid
from harness.types import (
    STREAM_INTERVAL,
    FinishReason,
    GenerationDelta,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
    TokenIds,
    VersionSpan,
    as_ids,
)
from tests.checkout import ROOT
from tests.fake_engines.providers import KINDS, LOCAL_SERVED_KIND, Bench, Opening, documented_exceptions
from tests.local_model import LocalEngines

GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
RIVERS = ["Rhine", "Danube"]
ENGINES_PAGE = ROOT / "docs" / "engines.md"

_DEADLINE_S = 240  # before the time limit of a test
_SMALL_KV_BYTES = 12 << 20  # some 1000 tokens of the model, which a test can fill in seconds


@pytest.fixture(scope="module", name="small_context_engine")
def _small_context_engine(local_engines: LocalEngines) -> HuggingFaceTokenProvider:
    return asyncio.run(local_engines.open(kv_cache_bytes=_SMALL_KV_BYTES))


where_engines_differ = pytest.mark.parametrize(
    "opening", [kind.parameter() for kind in (*KINDS, LOCAL_SERVED_KIND)], indirect=True
)


@pytest.fixture(name="opening", params=[kind.parameter() for kind in KINDS])
def _opening(request: pytest.FixtureRequest) -> Opening:
    return partial(request.param.open, *(request.getfixturevalue(name) for name in request.param.needs))


@pytest_asyncio.fixture(name="bench")
async def _bench(opening: Opening) -> AsyncIterator[Bench]:
    async with opening() as bench:
        yield bench


async def generate(bench: Bench, params: SamplingParams = GREEDY, **options: Any) -> GenerationResult:
    """One generation after the bench's prompt, with a fresh request id and session."""
    options = {"request_id": uuid4().hex, "session_id": uuid4().hex} | options
    return await bench.provider.generate(GenerationRequest(bench.prompt, params, **options))


def slow(bench: Bench) -> SamplingParams:
    """Parameters of a generation that takes long enough to interfere with."""
    return replace(GREEDY, max_new_tokens=bench.slow_tokens, temperature=1.0, seed=7)


class Running:
    """A streamed generation under way."""

    def __init__(self, bench: Bench, params: SamplingParams) -> None:
        self.request_id = uuid4().hex
        self.sampled = 0
        self._began = asyncio.Event()
        self._stream = bench.provider.stream(GenerationRequest(bench.prompt, params, request_id=self.request_id))
        self.task = asyncio.ensure_future(self._read())

    async def _read(self) -> GenerationResult:
        async for piece in self._stream:
            if isinstance(piece, GenerationResult):
                return piece
            self.sampled += piece.output_ids.size
            self._began.set()
        raise AssertionError("the stream ended without a result")

    async def began(self) -> None:
        """The first tokens have come."""
        await asyncio.wait_for(self._began.wait(), _DEADLINE_S)


@asynccontextmanager
async def running(bench: Bench) -> AsyncIterator[Running]:
    """A slow generation that has begun; it is cancelled at the end of the block if it still runs."""
    generation = Running(bench, slow(bench))
    try:
        await generation.began()
        yield generation
    finally:
        generation.task.cancel()
        await asyncio.gather(generation.task, return_exceptions=True)


async def becomes(bench: Bench, *, running: bool) -> EngineHealth:
    """The health of the engine once it works on something or on nothing, as it says itself."""
    async with asyncio.timeout(_DEADLINE_S):
        while bool((health := await bench.provider.health()).running) is not running:
            await asyncio.sleep(0.02)
    return health


async def stays(bench: Bench, observe: Callable[[], Awaitable[object]]) -> None:
    """What is observed becomes the same for longer than a token takes; figures of a server may lag behind by one."""
    async with asyncio.timeout(_DEADLINE_S):
        seen, since = await observe(), monotonic()
        while monotonic() < since + bench.step_s:
            await asyncio.sleep(0.02)
            if (now := await observe()) != seen:
                seen, since = now, monotonic()


async def becomes_idle(bench: Bench) -> None:
    """The engine works on nothing any more, and continues doing so."""

    async def is_busy() -> bool:
        return bool((await bench.provider.health()).running)

    await becomes(bench, running=False)
    await stays(bench, is_busy)
    assert not await is_busy()


async def soon(result: Awaitable[GenerationResult]) -> GenerationResult:
    """What `result` is, within the time that any engine needs."""
    return await asyncio.wait_for(asyncio.ensure_future(result), _DEADLINE_S)


def assert_consistent(bench: Bench, result: GenerationResult) -> None:
    """One logprob and one version for each token, ids in the vocabulary."""
    size = result.output_ids.size
    assert result.output_ids.dtype == np.int32
    assert result.logprobs.shape == (size,)
    assert np.isfinite(result.logprobs).all()
    assert (result.logprobs <= 0).all()
    assert ((result.output_ids >= 0) & (result.output_ids < bench.provider.capabilities.vocab_size)).all()
    positions = [position for span in result.version_spans for position in range(span.start, span.end)]
    assert positions == list(range(size))


async def test_a_generation_holds_what_was_sampled(bench: Bench):
    """Ids, logprobs and versions describe the same tokens, and the budget is kept."""
    request_id = uuid4().hex
    result = await generate(bench, request_id=request_id)

    assert_consistent(bench, result)
    assert (result.output_ids.size, result.finish_reason) == (8, FinishReason.LENGTH)
    assert (result.request_id, result.input_ids.tolist()) == (request_id, bench.prompt.tolist())
    assert result.version_spans == (VersionSpan(bench.provider.weight_version, 0, 8),)


async def test_deltas_add_up_to_the_result(bench: Bench):
    """A stream says the same as its result, token by token."""
    stream = bench.provider.stream(GenerationRequest(bench.prompt, GREEDY, request_id=uuid4().hex))
    *deltas, result = [piece async for piece in stream]

    assert isinstance(result, GenerationResult)
    assert all(isinstance(delta, GenerationDelta) for delta in deltas)
    assert [i for delta in deltas for i in delta.output_ids.tolist()] == result.output_ids.tolist()
    assert [p for delta in deltas for p in delta.logprobs.tolist()] == result.logprobs.tolist()
    assert_consistent(bench, result)


async def test_what_arrives_before_the_end_is_the_beginning_of_the_result(bench: Bench):
    """With the versions that the engine has said by then: that much is left of a request that breaks."""
    arrived: list[GenerationDelta] = []
    params = replace(GREEDY, max_new_tokens=2 * STREAM_INTERVAL + 10)
    result = await generate(bench, params, on_delta=arrived.append)

    ids = [i for delta in arrived for i in delta.output_ids.tolist()]
    assert ids == result.output_ids[: len(ids)].tolist()
    assert [p for delta in arrived for p in delta.logprobs.tolist()] == result.logprobs[: len(ids)].tolist()
    [said] = result.version_spans
    for span in (span for delta in arrived for span in delta.version_spans):
        assert (span.version, span.start) == (said.version, 0)
        assert span.end <= len(ids)
    if bench.provider.capabilities.engine in ("sglang", "vllm"):
        assert len(ids) >= 2 * STREAM_INTERVAL
    assert_consistent(bench, result)


async def test_who_reads_along_hears_every_token_as_it_comes(bench: Bench):
    """Nothing twice and nothing that is not in the result; the last ones may come with it."""
    arrived: list[GenerationDelta] = []
    heard: list[list[int]] = []
    result = await generate(bench, GREEDY, on_delta=arrived.append, on_ids=lambda ids: heard.append(list(ids)))

    ids = [i for each in heard for i in each]
    assert ids == result.output_ids[: len(ids)].tolist()
    if bench.provider.capabilities.engine in ("sglang", "vllm"):
        assert len(ids) == result.output_ids.size
    assert_consistent(bench, result)


@where_engines_differ
async def test_a_stream_and_a_whole_generation_agree(bench: Bench):
    """Streaming changes how tokens arrive, not which. vLLM scores no prompt in a stream: there is one delta."""
    ids = {"request_id": uuid4().hex, "session_id": uuid4().hex}
    request = GenerationRequest(bench.prompt, GREEDY, **ids, prompt_logprobs_from=2)
    *deltas, streamed = [piece async for piece in bench.provider.stream(request)]
    whole = await generate(bench, prompt_logprobs_from=2)

    assert isinstance(streamed, GenerationResult)
    assert streamed.output_ids.tolist() == whole.output_ids.tolist()
    assert [i for delta in deltas for i in delta.output_ids.tolist()] == streamed.output_ids.tolist()
    assert (len(deltas) > 1) == bench.expects.streams_scored_prompts
    assert streamed.prompt_logprobs is not None
    assert whole.prompt_logprobs is not None
    np.testing.assert_allclose(streamed.prompt_logprobs.logprobs, whole.prompt_logprobs.logprobs, atol=bench.tolerance)


async def test_alternatives_come_best_first(bench: Bench):
    """A greedy token has the logprob of the best alternative."""
    result = await generate(bench, replace(GREEDY, top_logprobs=3))

    assert result.top_logprobs is not None
    assert result.top_logprobs.ids.shape == result.top_logprobs.logprobs.shape == (8, 3)
    assert (np.diff(result.top_logprobs.logprobs, axis=1) <= 0).all()
    rows = zip(result.output_ids, result.top_logprobs.ids, strict=True)
    assert all(token in row for token, row in rows), "two tokens may share the first place, in bfloat16 they often do"
    np.testing.assert_allclose(result.top_logprobs.logprobs[:, 0], result.logprobs, atol=1e-5)


async def test_scores_are_those_of_sampling(bench: Bench):
    """Scoring what was sampled gives the logprobs it was sampled with."""
    result = await generate(bench, replace(GREEDY, temperature=1.0, seed=3))
    whole = as_ids([*bench.prompt, *result.output_ids])
    scores = await bench.provider.score(whole, start=bench.prompt.size)

    assert (scores.start, scores.version) == (bench.prompt.size, bench.provider.weight_version)
    np.testing.assert_allclose(scores.logprobs, result.logprobs, atol=bench.tolerance)


async def test_the_last_id_of_the_vocabulary_is_scored(bench: Bench):
    """SGLang names it 0 in the logprobs of an input."""
    last = bench.provider.capabilities.vocab_size - 1
    scores = await bench.provider.score(as_ids([*bench.prompt, last, 1, last]), start=bench.prompt.size)

    assert scores.logprobs.shape == (3,)


@pytest.mark.parametrize("start", [1, 3, -1, 0])
async def test_prompt_logprobs_are_scores(bench: Bench, start: int):
    """A generation returns the logprobs of its input from anywhere on, as `score` does; 0 stands for the very end."""
    start = start if start > 0 else bench.prompt.size + start
    result = await generate(bench, prompt_logprobs_from=start)
    scores = await bench.provider.score(bench.prompt, start=start)

    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs.start == start
    assert result.prompt_logprobs.logprobs.shape == scores.logprobs.shape == (bench.prompt.size - start,)
    np.testing.assert_allclose(result.prompt_logprobs.logprobs, scores.logprobs, atol=bench.tolerance)


async def test_the_stated_scale_is_the_measured_one(bench: Bench):
    """Logprobs do not depend on the temperature that was sampled with."""
    assert bench.provider.capabilities.logprob_scale is LogprobScale.RAW
    measured = await measure_scale(bench.provider)
    assert measured is not None
    assert measured.mean_difference <= bench.tolerance


@where_engines_differ
async def test_a_seed_reproduces_a_generation(bench: Bench):
    """The same seed gives the same tokens, whatever else is sampled meanwhile.

    SGLang takes seeds only with --enable-deterministic-inference; without, it serves the request and samples freely. So
    hot that two free samples are never the same.
    """
    params = replace(GREEDY, max_new_tokens=16, temperature=2.0, seed=11)
    first, second, _ = await asyncio.gather(generate(bench, params), generate(bench, params), generate(bench))

    assert (first.output_ids.tolist() == second.output_ids.tolist()) == bench.expects.honors_seed
    assert first.output_ids.size == second.output_ids.size == 16


async def test_a_stop_id_ends_the_output_and_stays_in_it(bench: Bench):
    """The stop id is the last id, and is named."""
    params = replace(GREEDY, ignore_eos=False)
    free = (await generate(bench, params)).output_ids.tolist()
    stopped = await generate(bench, replace(params, stop_token_ids=(free[2],)))

    assert stopped.output_ids.tolist() == free[: free.index(free[2]) + 1]
    assert (stopped.finish_reason, stopped.matched_stop) == (FinishReason.STOP, free[2])


@where_engines_differ
async def test_a_stop_id_counts_although_the_end_of_turn_is_ignored(bench: Bench):
    """SGLang would look at no stop id at all, so there the two together are refused."""
    free = (await generate(bench)).output_ids.tolist()
    params = replace(GREEDY, stop_token_ids=(free[2],))
    if not bench.expects.stops_despite_ignored_eos:
        with pytest.raises(EngineRejected, match="stop_token_ids together with ignore_eos"):
            await generate(bench, params)
        return

    assert (await generate(bench, params)).output_ids.tolist() == free[: free.index(free[2]) + 1]


async def test_a_stop_string_ends_the_output_and_its_tokens_stay(bench: Bench):
    """The output goes up to and including the token that completes the string."""
    free = (await generate(bench)).output_ids.tolist()
    text = bench.tokenizer.decode(free[2:4]).strip()
    stopped = await generate(bench, replace(GREEDY, stop=(text,)))

    assert (stopped.finish_reason, stopped.matched_stop) == (FinishReason.STOP, text)
    assert stopped.output_ids.tolist() == free[: stopped.output_ids.size]
    assert text in bench.tokenizer.decode(stopped.output_ids.tolist())
    assert text not in bench.tokenizer.decode(stopped.output_ids[:-1].tolist())


@where_engines_differ
async def test_an_output_may_not_end_before_it_is_long_enough(bench: Bench):
    """What would end it is not sampled before; a script says what it says, and ends where it would."""
    params = replace(GREEDY, ignore_eos=False)
    end = (await generate(bench, params)).output_ids.tolist()[0]
    later = (await generate(bench, replace(params, stop_token_ids=(end,), min_new_tokens=4))).output_ids.tolist()

    assert (end not in later[:4]) is bench.expects.keeps_ends_away
    assert (len(later) >= 4) is bench.expects.keeps_ends_away


@where_engines_differ
async def test_an_output_can_be_held_to_a_schema(bench: Bench):
    """An engine that cannot says so before it samples; a script says what it says."""
    params = replace(GREEDY, ignore_eos=False, max_new_tokens=64, json_schema=json.dumps({"enum": RIVERS}))
    if not bench.provider.capabilities.follows_json_schema:
        assert not bench.expects.follows_json_schema
        with pytest.raises(EngineRejected, match="cannot hold an output to a JSON schema"):
            await generate(bench, params)
        return
    result = await generate(bench, params)
    said = bench.tokenizer.decode([each for each in result.output_ids.tolist() if each != result.matched_stop])

    assert is_wanted(said) is bench.expects.follows_json_schema


async def test_the_budget_ends_where_the_context_does(bench: Bench):
    """A prompt that nearly fills the context gets the tokens that fit."""
    context_length = bench.provider.capabilities.context_length
    prompt = as_ids(np.resize(bench.prompt, context_length - 4))
    params = replace(GREEDY, max_new_tokens=1000)
    result = await bench.provider.generate(GenerationRequest(prompt, params, request_id=uuid4().hex))

    assert 1 <= result.output_ids.size <= 4
    assert result.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("wrong", [[1, 2, 10**6], [-1], []])
async def test_impossible_input_never_reaches_the_engine(bench: Bench, wrong: list[int]):
    """One id outside the vocabulary would end a whole server."""
    with pytest.raises(EngineRejected):
        await bench.provider.generate(GenerationRequest(as_ids(wrong), GREEDY, request_id=uuid4().hex))
    with pytest.raises(EngineRejected):
        await bench.provider.generate(
            GenerationRequest(bench.prompt, replace(GREEDY, max_new_tokens=0), request_id=uuid4().hex)
        )

    assert (await generate(bench)).output_ids.size == 8


async def test_a_script_is_said_or_refused(bench: Bench):
    """To its last id, or as far as the budget goes; a provider that cannot promise it samples nothing in its place."""
    script_ids = as_ids([7, 9, 7, 11, 8, 10])
    if not bench.provider.capabilities.follows_scripts:
        with pytest.raises(EngineRejected, match="not known to follow scripts"):
            await generate(bench, script_ids=script_ids)
        return
    for budget in (len(script_ids), 4):
        said = await generate(bench, replace(GREEDY, max_new_tokens=budget), script_ids=script_ids)
        assert said.output_ids.tolist() == script_ids[:budget].tolist()
        assert said.finish_reason is FinishReason.LENGTH
    with pytest.raises(EngineRejected):
        await generate(bench, script_ids=as_ids([10**6]))


async def test_a_request_id_in_use_is_refused(bench: Bench):
    """Two live requests with one id could not be told apart."""
    async with running(bench) as live:
        with pytest.raises(EngineRejected, match=live.request_id):
            await generate(bench, request_id=live.request_id)


async def test_generations_at_once_do_not_mix(bench: Bench):
    """Each request gets its own tokens."""
    lengths = range(3, 9)
    requests = [generate(bench, replace(GREEDY, max_new_tokens=length)) for length in lengths]
    results = await asyncio.gather(*requests)

    assert [result.output_ids.size for result in results] == list(lengths)
    for result in results:
        assert_consistent(bench, result)


async def test_an_abort_ends_one_generation_with_its_partial_output(bench: Bench):
    """The aborted one ends as ABORT with what it had; the other one continues."""
    async with running(bench) as live, running(bench) as other:
        assert await bench.provider.abort(live.request_id) == 1
        result = await soon(live.task)

        assert result.finish_reason is FinishReason.ABORT
        assert live.sampled <= result.output_ids.size < bench.slow_tokens
        assert result.matched_stop is None
        assert_consistent(bench, result)
        assert not other.task.done()


async def test_an_abort_reaches_a_request_that_is_not_streamed(bench: Bench):
    """The waiting caller gets the partial output."""
    request_id = uuid4().hex
    task = asyncio.ensure_future(generate(bench, slow(bench), request_id=request_id))
    await becomes(bench, running=True)
    assert await bench.provider.abort(request_id) == 1

    result = await soon(task)
    assert result.finish_reason is FinishReason.ABORT
    assert_consistent(bench, result)


async def test_an_abort_right_after_the_request_is_not_lost(bench: Bench):
    """An abort that could overtake its request does not."""
    request_id = uuid4().hex
    task = asyncio.ensure_future(generate(bench, slow(bench), request_id=request_id))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert await bench.provider.abort(request_id) == 1

    assert (await soon(task)).finish_reason is FinishReason.ABORT


async def test_an_abort_of_all_ends_all(bench: Bench):
    """Every generation in flight ends, an unknown id ends none."""
    async with running(bench) as first, running(bench) as second:
        assert await bench.provider.abort(uuid4().hex) == 0
        assert await bench.provider.abort(None) == 2
        for live in (first, second):
            assert (await soon(live.task)).finish_reason is FinishReason.ABORT


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_cancelling_stops_the_engine(bench: Bench, stream: bool):
    """Nobody waits any more, so nothing is sampled any more."""
    if stream:
        async with running(bench):
            pass
    else:
        task = asyncio.ensure_future(generate(bench, slow(bench)))
        await becomes(bench, running=True)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    await becomes_idle(bench)


async def test_leaving_a_stream_early_stops_the_engine(bench: Bench):
    """A reader that closes the stream after the first delta has ended the generation."""
    stream = bench.provider.stream(GenerationRequest(bench.prompt, slow(bench), request_id=uuid4().hex))
    async for _ in stream:
        break
    await stream.aclose()  # type: ignore[attr-defined]  # every provider's is a generator

    await becomes_idle(bench)


async def test_a_pause_that_aborts_ends_what_runs_and_holds_what_comes(bench: Bench):
    """In-flight generations end as ABORT; a request that arrives meanwhile completes after the resume."""
    async with running(bench) as live:
        await bench.provider.pause(PauseMode.ABORT)
        try:
            assert (await soon(live.task)).finish_reason is FinishReason.ABORT
            held = asyncio.ensure_future(generate(bench))
            await asyncio.sleep(0.3)
            health = await bench.provider.health()
            assert (health.ready, health.paused, held.done()) == (True, True, False)
        finally:
            await bench.provider.resume()
        assert (await soon(held)).finish_reason is FinishReason.LENGTH


async def test_a_pause_that_keeps_freezes_and_goes_on(bench: Bench):
    """A kept generation samples nothing while paused and ends as if nothing had happened."""
    async with running(bench) as live:

        async def sampled() -> int:
            return live.sampled

        await bench.provider.pause(PauseMode.KEEP)
        try:
            await stays(bench, sampled)
            assert not live.task.done()
            assert live.sampled < bench.slow_tokens
        finally:
            await bench.provider.resume()
        result = await soon(live.task)
        assert result.finish_reason is FinishReason.LENGTH
        assert_consistent(bench, result)


async def test_a_request_held_by_a_pause_can_be_aborted(bench: Bench):
    """It ends as ABORT without having sampled, at once."""
    await bench.provider.pause(PauseMode.ABORT)
    try:
        request_id = uuid4().hex
        held = asyncio.ensure_future(generate(bench, request_id=request_id))
        async with asyncio.timeout(_DEADLINE_S):
            while not (ended := await bench.provider.abort(request_id)):  # it is on its way
                await asyncio.sleep(0.02)
        result = await soon(held)
    finally:
        await bench.provider.resume()

    assert (ended, result.finish_reason, result.output_ids.size) == (1, FinishReason.ABORT, 0)


async def test_pause_and_resume_may_be_repeated(bench: Bench):
    """Each verb says what is to be, not what is to change."""
    for mode in (PauseMode.KEEP, PauseMode.ABORT, PauseMode.ABORT):
        await bench.provider.pause(mode)
    await bench.provider.resume()
    await bench.provider.resume()

    assert (await generate(bench)).output_ids.size == 8
    assert not (await bench.provider.health()).paused


@where_engines_differ
async def test_weights_change_between_two_tokens(bench: Bench):
    """A generation over an update carries both versions, in order; later ones only the new one."""
    old, new = bench.provider.weight_version, next_version(bench)
    async with running(bench) as live, updated(bench, new):
        if bench.expects.reports_spans:
            result = await soon(live.task)
            assert [span.version for span in result.version_spans] == [old, new]
            assert_consistent(bench, result)
        else:
            with pytest.raises(EngineReplyInvalid, match="which tokens are whose"):
                await soon(live.task)
        after = await generate(bench)

    assert [span.version for span in after.version_spans] == [new]


async def test_new_weights_are_those_that_sample(bench: Bench):
    """Their logprobs are others, and those of the old weights come back with them; a script has no weights."""
    before = await logprobs_of(bench, bench.prompt)
    async with updated(bench, next_version(bench)):
        between = await logprobs_of(bench, bench.prompt)
    after = await logprobs_of(bench, bench.prompt)

    assert np.abs(between - before).max() > 0.01
    if bench.has_weights:
        np.testing.assert_allclose(after, before, atol=bench.tolerance)


async def test_weights_can_change_while_paused(bench: Bench):
    """The engine stays paused, and serves the new weights afterwards."""
    new = next_version(bench)
    await bench.provider.pause(PauseMode.ABORT)
    try:
        async with updated(bench, new):
            assert (await bench.provider.health()).paused
            await bench.provider.resume()
            assert bench.provider.weight_version == new
            assert (await generate(bench)).version_spans == (VersionSpan(new, 0, 8),)
    finally:
        await bench.provider.resume()


@where_engines_differ
async def test_weights_that_do_not_fit_leave_the_old_ones_serving(bench: Bench):
    """The refusal is typed, the label stays, and so do the logprobs.

    The scripted engine reads no weights and takes any.
    """
    if not bench.expects.refuses_unfit_weights:
        await bench.provider.update_weights(bench.unfit_weights, label := next_version(bench))
        assert bench.provider.weight_version == label
        return
    before = await logprobs_of(bench, bench.prompt)
    version = bench.provider.weight_version
    with pytest.raises(EngineRejected):
        await bench.provider.update_weights(bench.unfit_weights, next_version(bench))

    assert bench.provider.weight_version == version
    np.testing.assert_allclose(await logprobs_of(bench, bench.prompt), before, atol=bench.tolerance)


async def test_health_answers_whatever_the_engine_does(bench: Bench):
    """Idle, busy or paused, an engine that works is ready."""
    assert (await bench.provider.health()).ready
    async with running(bench):
        busy = await becomes(bench, running=True)
        assert (busy.ready, busy.paused, busy.running) == (True, False, 1)


async def test_an_engine_counts_what_it_hands_over(bench: Bench):
    """Its own counters grow by the tokens of replies, whole, streamed and aborted, and say what scoring has cost."""
    await becomes_idle(bench)
    await stays(bench, partial(counts, bench))  # what earlier requests left is counted
    before = await counts(bench)
    handed = [(await generate(bench)).output_ids.size]
    async with running(bench) as streamed:
        pass  # which is left early: nobody hears its end
    await becomes_idle(bench)
    async with asyncio.timeout(_DEADLINE_S):
        while not is_counted(left := await counts(bench), since=before):
            await asyncio.sleep(0.05)
    async with running(bench) as aborted:
        await bench.provider.abort(aborted.request_id)
        handed.append((await soon(aborted.task)).output_ids.size)
    await bench.provider.score(bench.prompt, start=1)

    async with asyncio.timeout(_DEADLINE_S):
        while True:  # they may be a moment behind the replies
            after = await counts(bench)
            scored = after.scored - before.scored
            if after.tokens - left.tokens == handed[1] + scored:
                break
            await asyncio.sleep(0.05)
    assert 0 <= left.tokens - before.tokens - handed[0] - streamed.sampled <= slow(bench).max_new_tokens
    assert 0 <= scored <= 1
    assert (after.start, after.scored_unheard) == (before.start, before.scored_unheard)
    assert is_counted(after, since=before)


def test_what_an_engine_cannot_do_is_documented():
    """The list in docs/engines.md is what this suite asserts."""
    assert "\n".join(documented_exceptions()) in ENGINES_PAGE.read_text(encoding="utf-8")


async def counts(bench: Bench) -> EngineCount:
    """The counters of all workers together."""
    found = []
    for worker in bench.provider.workers.providers.values():
        assert isinstance(worker, CountsTokens)
        found.append(await worker.count_sampled())
    _, starts, *numbers = zip(*found, strict=True)
    assert all(starts)
    return EngineCount("all", " ".join(starts), *map(sum, numbers))


def is_counted(now: EngineCount, *, since: EngineCount) -> bool:
    """Whether the engine knows of every request that was sent, and has counted the tokens of all."""
    sent = now.own_requests - since.own_requests
    return (now.requests - since.requests, now.uncounted) == (sent, since.uncounted)


def is_wanted(said: str) -> bool:
    """Whether `said` is one of `RIVERS` in JSON."""
    return said in [json.dumps(river) for river in RIVERS]


async def logprobs_of(bench: Bench, ids: TokenIds) -> np.ndarray:
    """What the engine's weights make of `ids`."""
    return (await bench.provider.score(ids, start=1)).logprobs


@asynccontextmanager
async def updated(bench: Bench, version: str) -> AsyncIterator[None]:
    """Inside the block the engine serves its second checkpoint, as `version`; afterwards the first one again."""
    first, second = bench.weights
    await bench.provider.update_weights(second, version)
    try:
        yield
    finally:
        await bench.provider.update_weights(first, next_version(bench))


def next_version(bench: Bench) -> str:
    """The label after the current one."""
    version = bench.provider.weight_version
    return str(0 if version == "default" else int(version) + 1)

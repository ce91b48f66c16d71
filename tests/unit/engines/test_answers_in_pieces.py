"""An answer that comes in pieces is the answer that comes as a whole, and its beginning tells the truth at any moment.

Over fakes of both servers: what is said, how it ends, versions, logprobs, alternatives, scored input, scripts, guards.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from harness.engines.base import LogprobScale
from harness.engines.remote.provider import RemoteProvider
from harness.engines.remote.reply import Asked
from harness.engines.remote.sglang_wire import MetaInfo, SGLangReply, StreamedReply
from harness.engines.scripted import Script, ScriptedEngine, ScriptedFault, ScriptStep
from harness.errors import EngineConnectionLost, EngineError, EngineReplyInvalid
from harness.types import GenerationDelta, GenerationRequest, GenerationResult, SamplingParams, as_ids
from server_patch.repeat_terminate import RepeatTerminateConfig
from tests.fake_engines.fake_server import serving
from tests.fake_engines.providers import FAKE_KINDS, fake_provider, make_fake, toy_tokenizer
from tests.session_servers.served import eventually
from tests.thoroughness import examples

GUARD = RepeatTerminateConfig(
    enabled=True, min_new_tokens=60, max_consecutive_token_repeats=30, ngram_size=3, ngram_repeats=15
)
PROMPT = as_ids([40, 41, 42, 43, 44])
LETTERS = [97, 98, 99, 100]
"""Ids of the toy tokenizer that are characters of their own."""
BEFORE, AFTER = "1", "2"


class UpdatedEngine(ScriptedEngine):
    """Takes other weights behind a token of each generation."""

    updates_behind: int | None = None

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[GenerationDelta | GenerationResult, None]:
        count = 0
        async with aclosing(super().stream(request)) as pieces:
            async for piece in pieces:
                yield piece
                count += piece.output_ids.size
                if count == self.updates_behind:
                    self.relabel(AFTER)


@dataclass(frozen=True)
class Case:
    """One generation."""

    tokens: tuple[int, ...]
    budget: int
    stop: tuple[str, ...]
    alternatives: int
    scored_from: int | None
    updates_behind: int | None
    aborts_behind: int | None
    is_guarded: bool
    is_forced: bool


CASES = st.builds(
    Case,
    tokens=st.one_of(
        st.lists(st.sampled_from(LETTERS), min_size=1, max_size=180).map(tuple),
        st.lists(st.sampled_from(LETTERS), min_size=3, max_size=3).map(lambda turn: tuple(turn) * 60),
    ),
    budget=st.integers(1, 200),
    stop=st.lists(st.text("abcd", min_size=3, max_size=5), max_size=1).map(tuple),
    alternatives=st.integers(0, 2),
    scored_from=st.none() | st.integers(1, PROMPT.size - 1),
    updates_behind=st.none() | st.integers(1, 150),
    aborts_behind=st.none() | st.integers(0, 150),
    is_guarded=st.booleans(),
    is_forced=st.booleans(),
).filter(lambda case: not case.is_forced or case.aborts_behind is None)  # whether it obeys is asked at entry

UPDATED_IN_THE_SECOND_PIECE = Case(
    tokens=(97, 98, 99) * 60,
    budget=180,
    stop=(),
    alternatives=0,
    scored_from=None,
    updates_behind=20,
    aborts_behind=None,
    is_guarded=False,
    is_forced=False,
)


@asynccontextmanager
async def serving_case(kind: str, case: Case) -> AsyncIterator[tuple[RemoteProvider, UpdatedEngine]]:
    """The provider of a server that samples `case`, and the engine of that."""
    fault = None if case.aborts_behind is None else ScriptedFault.ABORT
    step = ScriptStep(tokens=case.tokens, token_delay_s=1e-9, fault=fault, fault_after=case.aborts_behind or 0)
    engine = UpdatedEngine(toy_tokenizer(), Script((step,)), context_length=4096)
    guard = GUARD if case.is_guarded else None
    fake = make_fake(kind, engine, repeat_guard=guard, obeys=True)
    async with serving(fake, notices_disconnects=True):
        provider = fake_provider(fake, logprob_scale=LogprobScale.AFTER_TEMPERATURE, repeat_guard=guard)
        provider.proves_scripts = case.is_forced
        async with provider:
            engine.updates_behind = case.updates_behind
            yield provider, engine


async def ask(provider: RemoteProvider, case: Case, deltas: list[GenerationDelta] | None) -> dict[str, Any]:
    """The answer but for its name and its time; or why there is none."""
    request = GenerationRequest(
        PROMPT,
        SamplingParams(case.budget, temperature=1.0, stop=case.stop, top_logprobs=case.alternatives),
        uuid4().hex,
        prompt_logprobs_from=case.scored_from,
        script_ids=as_ids(case.tokens) if case.is_forced else None,
        on_delta=None if deltas is None else deltas.append,
    )
    try:
        result = await provider.generate(request)
    except EngineError as error:
        return {"error": type(error)}
    told = structs.asdict(structs.replace(result, request_id="", seconds=0.0))
    scored = {name: told[name] and asdict(told[name]) for name in ("top_logprobs", "prompt_logprobs")}
    return told | scored | {"version_spans": [asdict(span) for span in result.version_spans]}


async def look_around(provider: RemoteProvider) -> None:
    """Ask for the label all the time, as a server does while turns run."""
    while True:
        with suppress(EngineError):
            await provider.read_version()
        await asyncio.sleep(0)


@pytest.mark.parametrize("kind", FAKE_KINDS)
@settings(max_examples=examples(15), deadline=None)
@given(case=CASES)
@example(case=UPDATED_IN_THE_SECOND_PIECE)
def test_an_answer_in_pieces_is_the_whole_answer(kind: str, case: Case):
    """Nothing is lost or said twice at a joint; and no token is said to be of weights that did not sample it."""
    asyncio.run(compare(kind, case))


async def compare(kind: str, case: Case) -> None:
    """Ask the same in both ways."""
    deltas: list[GenerationDelta] = []
    async with serving_case(kind, case) as (provider, engine):
        engine.relabel(BEFORE)
        await provider.read_version()
        whole = await ask(provider, case, None)
        engine.relabel(BEFORE)
        await provider.read_version()
        looks = asyncio.create_task(look_around(provider))
        in_pieces = await ask(provider, case, deltas)
        looks.cancel()
        await asyncio.gather(looks, return_exceptions=True)

    np.testing.assert_equal(in_pieces, whole)
    if "error" in whole:
        return
    ids = [token for delta in deltas for token in delta.output_ids.tolist()]
    logprobs = [value for delta in deltas for value in delta.logprobs.tolist()]
    truth = [span["version"] for span in whole["version_spans"] for _ in range(span["end"] - span["start"])]
    assert ids == whole["output_ids"][: len(ids)].tolist()
    assert logprobs == whole["logprobs"][: len(ids)].tolist()
    for delta in deltas:
        for span in delta.version_spans:
            assert [span.version] * (span.end - span.start) == truth[span.start : span.end]


@pytest.mark.parametrize("kind", FAKE_KINDS)
async def test_a_request_that_was_answered_is_not_taken_back(kind: str):
    """The engine hears of the generation only: an abort of it would cost a connection and a tenth of a second."""
    engine = ScriptedEngine(toy_tokenizer(), Script((ScriptStep(tokens=(97,) * 120, token_delay_s=1e-9),)))
    fake = make_fake(kind, engine)
    async with (
        serving(fake, notices_disconnects=True),
        fake_provider(fake, logprob_scale=LogprobScale.AFTER_TEMPERATURE) as provider,
    ):
        before = len(fake.posted)
        deltas: list[GenerationDelta] = []
        await provider.generate(GenerationRequest(PROMPT, SamplingParams(120), uuid4().hex, on_delta=deltas.append))

        assert deltas
        assert len(fake.posted) - before == 1


@pytest.mark.parametrize("is_read_along", [False, True], ids=["together", "live"])
@pytest.mark.parametrize("is_cancelled", [False, True], ids=["broken", "cancelled"])
@pytest.mark.parametrize("kind", FAKE_KINDS)
async def test_what_has_come_of_a_request_without_an_end_is_told(kind: str, is_cancelled: bool, is_read_along: bool):
    """The server dies, or nobody waits any more: but for the last interval, everything is known."""
    tokens = (97, 98, 99, 100) * 50
    engine = ScriptedEngine(toy_tokenizer(), Script((ScriptStep(tokens=tokens, token_delay_s=1e-3),)))
    fake = make_fake(kind, engine)
    async with (
        serving(fake, notices_disconnects=True),
        fake_provider(fake, logprob_scale=LogprobScale.AFTER_TEMPERATURE) as provider,
    ):
        fake.dies_after = [] if is_cancelled else [160]
        deltas: list[GenerationDelta] = []
        heard: list[int] = []
        on_ids = heard.extend if is_read_along else None
        request = GenerationRequest(PROMPT, SamplingParams(200), uuid4().hex, on_delta=deltas.append, on_ids=on_ids)
        asking = asyncio.create_task(provider.generate(request))
        if is_cancelled:
            await eventually(lambda: len(fake.log.get(request.request_id, ())) >= 160)
            asking.cancel()
        with pytest.raises(asyncio.CancelledError if is_cancelled else EngineConnectionLost):
            await asking

    ids = [token for delta in deltas for token in delta.output_ids.tolist()]
    assert tuple(ids) == tokens[: len(ids)]
    assert len(ids) >= 100
    assert sum(delta.logprobs.size for delta in deltas) == len(ids)
    assert heard == ids[: len(heard)]
    assert bool(heard) == is_read_along


def chunk_of(ids: Sequence[int], count: int, logprob: float = -0.5) -> SGLangReply:
    """The next tokens of a stream, `count` in all."""
    entries: list[tuple[float | None, int, str | None]] = [(logprob, token_id, None) for token_id in ids]
    meta = MetaInfo("r", count, weight_version=BEFORE, output_token_logprobs=entries)
    return SGLangReply(meta, list(ids))


def test_of_a_stream_that_is_wrong_somewhere_what_came_before_that_is_told():
    """And then what is wrong. Whoever reads along has heard the ids, which are of the vocabulary."""
    asked = Asked("sglang", GenerationRequest(PROMPT, SamplingParams(9), "r"), vocab_size=200)
    streamed = StreamedReply(asked, BEFORE)
    for chunk in (chunk_of([1, 2], 2), chunk_of([3], 3), chunk_of([4], 4, logprob=0.5), chunk_of([5], 5)):
        streamed.add(chunk)
    deltas = streamed.deltas()
    told = [next(deltas), next(deltas)]
    with pytest.raises(EngineReplyInvalid, match="logprob"):
        next(deltas)

    assert streamed.new_ids() == [1, 2, 3, 4, 5]
    assert [(delta.output_ids.tolist(), delta.version_spans[-1].end) for delta in told] == [([1, 2], 2), ([3], 3)]
    streamed.add(chunk_of([200], 6))
    with pytest.raises(EngineReplyInvalid, match="vocabulary"):
        streamed.new_ids()

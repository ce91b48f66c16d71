"""Routed experts of real SGLang, with a tiny random mixture: those of transformers' own pass over the same tokens."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
import pytest_asyncio
from anyio.from_thread import start_blocking_portal

from harness.engines.base import PauseMode
from harness.engines.remote.sglang import SGLangTokenProvider
from harness.lab.lanes import LaneEngine, LaneSpec, open_lane
from harness.tokens.tokenizer import Tokenizer
from harness.types import FinishReason, GenerationRequest, GenerationResult, SamplingParams, TokenIds, as_ids
from tests.plain_experts import plain_experts, write_mixture
from tests.real_engines import on_real

pytestmark = on_real(LaneEngine.SGLANG)

KIND = "8 experts"
SLOTS = 2
"""Requests that the server works on at once; more of them wait."""
LONG = 1900
"""Tokens in which an abort or an update comes, also from a process that stands still for seconds."""
ARGUMENTS = (
    *("--enable-return-routed-experts", "--context-length", "2048"),
    *("--max-running-requests", str(SLOTS), "--max-total-tokens", "8192"),
)
PROMPT = as_ids([40, 41, 60, 7, 99])


@dataclass(frozen=True)
class Served:
    """A running server and the folder of its weights."""

    url: str
    folder: Path


@pytest.fixture(scope="module", name="served")
def _served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_mixture(tmp_path_factory.mktemp("mixture"), KIND)
    lane = open_lane(LaneSpec(LaneEngine.SGLANG, folder, arguments=ARGUMENTS))
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(lane) as running:
        yield Served(running.url, folder)


@pytest_asyncio.fixture(name="engine")
async def _engine(served: Served) -> AsyncIterator[SGLangTokenProvider]:
    tokenizer = Tokenizer.load(served.folder)
    async with SGLangTokenProvider(served.url, vocab_size=tokenizer.vocab_size, tokenizer=tokenizer) as engine:
        yield engine


def request(ids: TokenIds, start: int, tokens: int = 6, **fields: object) -> GenerationRequest:
    return GenerationRequest(ids, SamplingParams(tokens, ignore_eos=True), uuid4().hex, rows_from=start, **fields)


def whole(result: GenerationResult) -> TokenIds:
    return as_ids(np.concatenate([result.input_ids, result.output_ids]))


def rows_of(result: GenerationResult) -> np.ndarray:
    assert result.rows is not None
    return result.rows.values


async def cut_after_first_piece(engine: SGLangTokenProvider, asked: GenerationRequest) -> GenerationResult:
    """The result of a generation that is aborted when its first tokens come."""
    async for piece in engine.stream(asked):
        if isinstance(piece, GenerationResult):
            return piece
        await engine.abort(asked.request_id)
    raise AssertionError("a stream ends with a result")


async def test_rows_of_turns_are_those_of_one_request_and_of_transformers(
    engine: SGLangTokenProvider, served: Served
) -> None:
    """Five turns, each from the last known token on, with everything before it cached; bit for bit."""
    ids, start, parts = PROMPT, 0, []
    for turn in range(5):
        result = await engine.generate(request(ids, start))
        parts.append(rows_of(result))
        start = whole(result).size - 1
        ids = as_ids(np.concatenate([whole(result), [50 + turn, 51]]))
    stitched, told = np.concatenate(parts), whole(result)
    again = await engine.generate(request(told, 0, 1))

    assert np.array_equal(stitched, rows_of(again)[: told.size - 1])
    assert np.array_equal(np.sort(stitched), plain_experts(served.folder, told)[:-1])


async def test_an_abort_in_flight_keeps_its_rows_and_the_continuation_brings_the_rest(
    engine: SGLangTokenProvider, served: Served
) -> None:
    cut = await cut_after_first_piece(engine, request(PROMPT, 0, LONG))
    ids = whole(cut)
    rest = await engine.generate(request(ids, ids.size - 1, continues=cut.output_ids.size))

    assert cut.finish_reason is FinishReason.ABORT
    assert np.array_equal(np.sort(rows_of(cut)), plain_experts(served.folder, ids)[:-1])
    assert np.array_equal(np.sort(rows_of(rest)), plain_experts(served.folder, whole(rest))[ids.size - 1 : -1])


async def test_what_is_aborted_in_the_queue_has_no_rows(engine: SGLangTokenProvider) -> None:
    """The next request asks for them all."""
    running = [asyncio.create_task(engine.generate(request(PROMPT, 0, LONG))) for _ in range(SLOTS + 1)]
    async with asyncio.timeout(60):
        while (await engine.health()).waiting < 1:
            await asyncio.sleep(0.01)
    await engine.abort(None)
    results = await asyncio.gather(*running)

    waited = [result for result in results if not result.output_ids.size]
    assert len(waited) == 1
    assert waited[0].rows is None
    assert rows_of(await engine.generate(request(PROMPT, 0))).shape == (PROMPT.size + 5, 3, 2)


async def test_an_update_in_place_leaves_the_rows_of_its_request_out(
    engine: SGLangTokenProvider, served: Served, tmp_path: Path
) -> None:
    """The server reads the tokens again under the new weights; the next request has rows of these weights."""
    other, pieces, result = write_mixture(tmp_path / "other", KIND, seed=1), 0, None
    async for piece in engine.stream(request(PROMPT, 0, LONG)):
        pieces += 1
        if pieces == 1:
            await engine.pause(PauseMode.KEEP)
            await engine.update_weights(other, "1")
            await engine.resume()
        result = piece
    after = await engine.generate(request(PROMPT, 0))
    await engine.update_weights(served.folder, "0")

    assert isinstance(result, GenerationResult)
    assert len(result.version_spans) == 2
    assert result.rows is None
    assert np.array_equal(np.sort(rows_of(after)), plain_experts(other, whole(after))[:-1])

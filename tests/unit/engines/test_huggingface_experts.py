"""The experts that the local engine reports are those that the model's own forward pass chooses for the same tokens."""

import asyncio
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from harness.engines.base import PauseMode
from harness.engines.huggingface import HuggingFaceTokenProvider
from harness.errors import EngineRejected
from harness.types import FinishReason, GenerationRequest, GenerationResult, SamplingParams, TokenIds, as_ids
from tests.plain_experts import MIXTURES, plain_experts, write_mixture
from tests.toy_model import write_toy_weights

pytestmark = pytest.mark.xdist_group("torch")  # one worker imports it, and makes each engine

PROMPT = as_ids([3, 14, 15, 9, 26, 5])


@pytest.fixture(name="kind", params=MIXTURES, scope="module")
def _kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(name="folder", scope="module")
def _folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixture(tmp_path_factory.mktemp("mixture"), kind)


@pytest.fixture(name="engine", scope="module")
def _engine(folder: Path) -> Iterator[HuggingFaceTokenProvider]:
    engine = HuggingFaceTokenProvider(folder, step_tokens=16)
    asyncio.run(engine.__aenter__())
    yield engine
    asyncio.run(engine.__aexit__(None, None, None))


def request(ids: TokenIds, start: int | None, tokens: int = 6, **fields: object) -> GenerationRequest:
    params = SamplingParams(tokens, ignore_eos=True, seed=7)
    return GenerationRequest(ids, params, uuid.uuid4().hex, rows_from=start, **fields)


def whole(result: GenerationResult) -> TokenIds:
    return as_ids(np.concatenate([result.input_ids, result.output_ids]))


def must_be_true(result: GenerationResult, folder: Path) -> None:
    rows, start = result.rows, result.rows and result.rows.start
    assert rows is not None
    assert np.array_equal(np.sort(rows.values), plain_experts(folder, whole(result))[start:-1])


async def test_rows_of_a_mixed_batch_are_those_of_a_plain_forward(
    engine: HuggingFaceTokenProvider, folder: Path
) -> None:
    """Prompts of all lengths, in chunks and whole, from any offset on, beside requests that ask for none."""
    prompts = [as_ids(np.arange(length) * 7 % 90 + 1) for length in (1, 2, 17, 40, 5)]
    asked = [request(ids, start) for ids, start in zip(prompts, (0, 1, 0, 33, None), strict=True)]

    results = await asyncio.gather(*[engine.generate(each) for each in asked])

    for result in results[:-1]:
        must_be_true(result, folder)
    assert results[-1].rows is None


async def test_turns_with_offsets_have_the_rows_of_one_pass_over_the_whole(
    engine: HuggingFaceTokenProvider, folder: Path
) -> None:
    """Each of five turns asks from the last known token on, and computes nothing again for its rows."""
    ids, start, parts = PROMPT, 0, []
    for turn in range(5):
        result = await engine.generate(request(ids, start, session_id="s"))
        assert result.rows is not None
        assert (result.rows.start, result.cached_tokens) == (start, start)
        parts.append(result.rows.values)
        start = whole(result).size - 1
        ids = as_ids(np.concatenate([whole(result), [40 + turn, 41]]))
    assert np.array_equal(np.sort(np.concatenate(parts)), plain_experts(folder, whole(result))[:-1])


async def test_a_cached_prefix_leaves_no_row_out(engine: HuggingFaceTokenProvider, folder: Path) -> None:
    """Another session has computed the prompt; its rows were never asked for."""
    other = as_ids([8, *PROMPT])
    await engine.generate(request(other, None))
    must_be_true(await engine.generate(request(other, 2)), folder)


async def test_a_cut_request_and_its_continuation_have_all_rows(engine: HuggingFaceTokenProvider, folder: Path) -> None:
    """The first has them up to its last token but one; the second begins at that token."""
    first = None
    async for first in engine.stream(request(PROMPT, 0, 500)):
        if not isinstance(first, GenerationResult):
            await engine.abort(None)
    assert isinstance(first, GenerationResult)
    assert first.finish_reason is FinishReason.ABORT
    must_be_true(first, folder)

    second = await engine.generate(request(whole(first), whole(first).size - 1, continues=first.output_ids.size))
    must_be_true(second, folder)


async def test_rows_are_those_of_the_weights_that_sampled_the_next_token(
    engine: HuggingFaceTokenProvider, folder: Path, kind: str, tmp_path: Path
) -> None:
    """A weight update in place computes the tokens again and changes no row that was there."""
    other = write_mixture(tmp_path / "other", kind, seed=1)
    pieces, result = engine.stream(request(PROMPT, 0, 40)), None
    seen = 0
    async for piece in pieces:
        seen += 1
        if seen == 5:
            await engine.pause(PauseMode.KEEP)
            await engine.update_weights(other, "1")
            await engine.resume()
        result = piece

    await engine.update_weights(folder, "0")
    assert isinstance(result, GenerationResult)
    assert result.rows is not None
    before, after = result.version_spans
    border = PROMPT.size + after.start - 1  # the token that the first pass under the new weights reads last
    ids, rows = whole(result), np.sort(result.rows.values)
    assert (before.version, after.version) == ("0", "1")
    assert np.array_equal(rows[:border], plain_experts(folder, ids)[:border])
    assert np.array_equal(rows[border:], plain_experts(other, ids)[border:-1])
    assert not np.array_equal(rows[:border], plain_experts(other, ids)[:border])


async def test_a_dense_model_refuses_rows(tmp_path: Path) -> None:
    """Before anything is sampled."""
    async with HuggingFaceTokenProvider(write_toy_weights(tmp_path, 0)) as engine:
        assert engine.capabilities.routed_experts is None
        with pytest.raises(EngineRejected, match="returns no routed experts"):
            await engine.generate(request(PROMPT, 0))

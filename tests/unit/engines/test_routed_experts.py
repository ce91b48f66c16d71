"""Routed experts of engine servers: found at connect, asked for from an offset on, and refused when they are wrong."""

import json
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.engines.recorded_rows import find_router
from harness.engines.scripted import Script, ScriptStep, scripted_experts
from harness.errors import EngineRejected, EngineReplyInvalid
from harness.tokens.tokenizer import Tokenizer
from harness.types import GenerationRequest, SamplingParams, as_ids
from tests.fake_engines.fake_server import FakeServer, serving
from tests.fake_engines.providers import fake_provider, make_fake
from tests.session_servers.true_rows import ROUTER
from tests.toy_model import write_toy_model
from tests.unit.engines.test_answers_in_pieces import AFTER, UpdatedEngine

KINDS = ("sglang", "sglang-incremental", "vllm")
PROMPT = as_ids([40, 41, 42, 43, 44])
SHAPE = {"num_hidden_layers": 2, "num_experts_per_tok": 2}


def mixture(tmp_path: Path, **config: Any) -> Tokenizer:
    """The toy tokenizer in the folder of a model with that configuration."""
    folder = write_toy_model(tmp_path)
    (folder / "config.json").write_text(json.dumps(config or {**SHAPE, "num_experts": 8}))
    return Tokenizer.load(folder)


@asynccontextmanager
async def connected(kind: str, tokenizer: Tokenizer, **fields: Any):
    """A fake server and a provider for it; `fields` are set before the provider connects."""
    fake: FakeServer = make_fake(kind, UpdatedEngine(tokenizer, Script((ScriptStep(text="abcdef"),))))
    for name, value in fields.items():
        setattr(fake, name, value)
    async with serving(fake, notices_disconnects=True), fake_provider(fake, tokenizer=tokenizer) as provider:
        yield fake, provider


def request(start: int | None, **fields: Any) -> GenerationRequest:
    return GenerationRequest(PROMPT, SamplingParams(max_new_tokens=6), f"{start or 0:032x}", rows_from=start, **fields)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", [0, 4])
@pytest.mark.parametrize("streams", [False, True])
async def test_rows_are_those_of_the_engine_from_the_offset_on(
    kind: str, start: int, streams: bool, tmp_path: Path
) -> None:
    """Up to the last token but one, whole and in pieces."""
    async with connected(kind, mixture(tmp_path)) as (_, provider):
        assert provider.capabilities.routed_experts == ROUTER
        result = await provider.generate(request(start, on_delta=(lambda delta: None) if streams else None))

    tokens = np.concatenate([result.input_ids, result.output_ids])[start:-1]
    assert result.rows is not None
    assert result.rows.start == start
    assert result.rows.values.dtype == np.uint8
    assert np.array_equal(result.rows.values, scripted_experts(ROUTER, tokens, start, "0"))


@pytest.mark.parametrize("kind", KINDS)
async def test_nothing_is_asked_for_without_a_session_that_records(kind: str, tmp_path: Path) -> None:
    async with connected(kind, mixture(tmp_path)) as (fake, provider):
        result = await provider.generate(request(None))

    assert result.rows is None
    assert "routed" not in json.dumps(fake.bodies[-1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "fields",
    [{"honors_offset": False}, {"change_rows": lambda rows: None}, {"change_rows": lambda rows: rows[:, :1]}],
    ids=["ignores the offset", "returns none", "another model"],
)
async def test_a_server_that_fails_the_test_at_connect_returns_no_rows(
    kind: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    """It serves all the same; who asks for rows is refused before anything is sampled."""
    async with connected(kind, mixture(tmp_path), **fields) as (_, provider):
        assert provider.capabilities.routed_experts is None
        await provider.generate(request(None))
        with pytest.raises(EngineRejected, match="returns no routed experts"):
            await provider.generate(request(0))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_dense_model_is_not_tested(kind: str, tmp_path: Path) -> None:
    async with connected(kind, mixture(tmp_path, num_hidden_layers=2)) as (fake, provider):
        assert provider.capabilities.routed_experts is None
        assert "routed" not in json.dumps(fake.bodies)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[:-1], "expected"),
        (lambda rows: np.concatenate([rows[:1], rows]), "expected"),
        (lambda rows: rows[-1:], "expected"),
        (lambda rows: np.tile(rows, (1, 2, 1)), "expected"),
        (lambda rows: rows.reshape(-1)[:-1], "expected"),
        (lambda rows: rows + np.uint8(8), r"expert ids .* expected 0\.\.7"),
    ],
    ids=[
        "a token too few",
        "a token too many",
        "none of the prompt",
        "more layers",
        "half a token",
        "ids beyond the experts",
    ],
)
async def test_wrong_rows_are_refused(kind: str, change: Any, message: str, tmp_path: Path) -> None:
    """With what came and what was expected."""
    async with connected(kind, mixture(tmp_path)) as (fake, provider):
        fake.change_rows = change
        with pytest.raises(EngineReplyInvalid, match=message):
            await provider.generate(request(0))
        fake.change_rows = lambda rows: rows
        assert (await provider.generate(request(1))).rows is not None


async def test_text_in_place_of_rows_is_refused(tmp_path: Path) -> None:
    """Nothing of the reply is used then."""
    async with connected("sglang", mixture(tmp_path)) as (fake, provider):
        body = fake._body
        fake._body = lambda told, sent=0: (
            answer := body(told, sent),
            answer["meta_info"].update(routed_experts="no base64!"),
        )[0]
        with pytest.raises(EngineReplyInvalid, match="routed experts that are no base64"):
            await provider.generate(request(0))


async def test_a_length_that_does_not_divide_names_all_numbers(tmp_path: Path) -> None:
    async with connected("sglang", mixture(tmp_path)) as (fake, provider):
        fake.change_rows = lambda rows: rows.reshape(-1)[:-1]
        with pytest.raises(EngineReplyInvalid, match=r"156 bytes .* 10 tokens x 2 layers x 2 experts x 4 bytes"):
            await provider.generate(request(0))


@pytest.mark.parametrize("kind", KINDS)
async def test_rows_of_a_request_under_two_versions_are_missing(kind: str, tmp_path: Path) -> None:
    """A server reads the tokens again under the new weights, and has the rows of that pass only."""
    async with connected(kind, mixture(tmp_path)) as (fake, provider):
        fake.engine._script = Script((ScriptStep(text="abcdef", token_delay_s=0.001),))
        fake.engine.updates_behind = 1
        result = await provider.generate(request(0))

    assert [span.version for span in result.version_spans] == ["0", AFTER]
    assert result.rows is None


@pytest.mark.parametrize(
    ("config", "router"),
    [
        ({**SHAPE, "num_experts": 8}, (2, 2, 8)),
        ({**SHAPE, "n_routed_experts": 256}, (2, 2, 256)),
        ({"text_config": {**SHAPE, "num_local_experts": 300}}, (2, 2, 300)),
        ({"num_hidden_layers": 2}, None),
        ({**SHAPE, "num_experts": "many"}, None),
    ],
    ids=["Qwen", "DeepSeek", "nested", "dense", "no number"],
)
def test_the_router_is_that_of_the_models_configuration(
    config: dict[str, Any], router: tuple[int, int, int] | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert find_router(tmp_path) == router
    assert find_router(tmp_path / "nowhere") is None

"""Weight updates under real sessions of the local engine, held against each checkpoint's own forward pass."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from harness.engines.base import PauseMode
from harness.engines.huggingface import HuggingFaceTokenProvider
from harness.lab.models.weight_files import perturb_checkpoint
from harness.tokens.model_family import open_chat_tokenizer
from harness.types import GenerationRequest, GenerationResult
from tests.controllers.weight_agents import Agents, unmet_versions, versions_of
from tests.ground_truth import TruthReport, compare
from tests.session_servers.served import eventually, serving_with

pytestmark = pytest.mark.model

NOISE = 0.05
TURN = {"max_tokens": 600, "temperature": 0.7, "stop": ["st"]}
"""A random model never ends a turn by itself; about one of thirty tokens has these letters."""


@pytest.fixture(scope="session", name="model")
def _model(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two layers with the real tokenizer and template: fast, and its logprobs are as exact."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=49152,
        pad_token_id=2,
        eos_token_id=2,
        bos_token_id=1,
        max_position_embeddings=4096,
        initializer_range=0.2,
    )
    folder = tmp_path_factory.mktemp("model")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((model_dir / name).read_bytes())
    return folder


@pytest.fixture(scope="session", name="checkpoints")
def _checkpoints(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Versions 0 to 3, each another model."""
    folder = tmp_path_factory.mktemp("checkpoints")
    moved = {
        number: perturb_checkpoint(model, folder / str(number), number=number, noise=NOISE, moves_embeddings=True)
        for number in (1, 2, 3)
    }
    return {0: model, **moved}


class CountingProvider(HuggingFaceTokenProvider):
    """Streams whatever it generates, so that one can see how far each request in flight has come."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sampled = Counter[str]()

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """See `TokenProvider.generate`."""
        try:
            async with aclosing(self.stream(request)) as events:
                async for event in events:
                    if isinstance(event, GenerationResult):
                        return event
                    self.sampled[request.request_id] += event.output_ids.size
        finally:
            del self.sampled[request.request_id]
        raise AssertionError("a stream ends with its result")


class LocalAgents(Agents):
    """Agents of a local engine, into which one can look."""

    async def further(self, *asking: asyncio.Task[None]) -> None:
        assert isinstance(self.engine, CountingProvider)
        sampled = self.engine.sampled
        await eventually(lambda: max(sampled.values(), default=0) > 8 or all(task.done() for task in asking))


@pytest.fixture(name="agents")
async def _agents(model: Path, checkpoints: dict[int, Path], tmp_path: Path) -> AsyncIterator[Agents]:
    engine = CountingProvider(model, max_batch=8, step_tokens=64)
    chat_tokenizer = open_chat_tokenizer(model)
    async with serving_with(engine, store=tmp_path / "s.db", chat_tokenizer=chat_tokenizer, patience_s=60) as client:
        yield LocalAgents(client, engine, checkpoints, turn=TURN, long_turn={**TURN, "max_tokens": 500, "stop": []})


def assert_true(verdict: TruthReport) -> None:
    """Every value is that of its checkpoint; checkpoints differ enough for a mistake to show."""
    assert verdict.third_states == []
    assert verdict.behavior_difference < 1e-3
    assert verdict.proximal_difference < 1e-3
    assert verdict.moved > 0.05


async def test_every_token_that_met_its_next_version_has_that_versions_logprob(agents: Agents):
    """Updates in the middle of turns, between turns, while tools run, and right after a session's last turn."""
    in_turn, in_tool, between, _finished = sessions = [await agents.create() for _ in range(4)]
    for session in sessions:
        await agents.turn(session)
    asking = await agents.long_turn(in_turn)
    reports = [await agents.update(1)]
    await agents.turn(between)
    await agents.further(asking)
    reports.append(await agents.update(2))
    await asking
    await asyncio.gather(agents.turn(in_tool), agents.turn(between))
    reports.append(await agents.update(3))
    await agents.turn(between)

    verdict = await agents.verdict(*sessions)
    samples = [await agents.sample(session) for session in sessions]

    assert_true(verdict)
    assert [versions_of(sample) for sample in samples] == [{0, 1, 2}, {0, 2}, {0, 1, 2, 3}, {0}]
    # Version 3 came last: tokens of version 2 met it where the branch was asked for once more. Nothing else is missing.
    assert [unmet_versions(sample) for sample in samples] == [{2}, {2}, {3}, set()]
    assert samples[0]["metadata"]["weight_updates"] == {"abort": 2}
    assert [report.problems for report in reports] == [()] * 3


async def test_kept_generations_are_true_under_both_versions(agents: Agents):
    """Frozen, not ended: behavior logprobs are those of each version, and nothing is scored on the way."""
    session = await agents.create()
    asking = await agents.long_turn(session)
    await agents.update(1, PauseMode.KEEP)
    await asking

    verdict = await agents.verdict(session)

    sample = await agents.sample(session)
    assert verdict.behavior_difference < 1e-3
    assert verdict.third_states == []
    assert (verdict.met_next, sample["metadata"]["weight_updates"]) == (0, {"keep": 1})


async def test_the_comparison_notices_a_wrong_value(agents: Agents):
    """A proximal value of the right token under the wrong version is far outside the tolerance."""
    session = await agents.create()
    await agents.turn(session)
    await agents.update(1)
    await agents.turn(session)
    sample = await agents.sample(session)
    shifted = sample | {"proximal_logprobs": [*sample["proximal_logprobs"][1:], 0.0]}
    mislabeled = sample | {"proximal_logprobs": sample["rollout_log_probs"]}

    verdicts = [await asyncio.to_thread(compare, [wrong], agents.checkpoints) for wrong in (shifted, mislabeled)]

    assert min(verdict.proximal_difference for verdict in verdicts) > 0.05

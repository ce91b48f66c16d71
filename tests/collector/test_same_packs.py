"""A step is the same at any concurrency: twenty steps have the same packs, digest for digest (I10)."""

from pathlib import Path

import pytest

from harness.engines.base import TokenProvider
from harness.engines.huggingface import HuggingFaceTokenProvider
from harness.training.collector.groups import RolloutIndex, drop_zero_variance
from harness.training.collector.pipeline import StepPipeline
from harness.training.collector.record.step_ledger import book_step
from harness.training.collector.segment_maker import SegmentMaker
from harness.training.collector.step_rules import StepBudget, StepRules
from harness.training.learner.learner import ScriptedLearner
from tests.builders import toy_tokenizer
from tests.collector.training import playing
from tests.toy_model import write_toy_model

STEPS = 20


def fails_by_index(index: RolloutIndex) -> bool:
    """One of seven first attempts."""
    return index.attempt == 0 and (5 * index.group.step + 3 * index.group.number + index.member) % 7 == 0


async def play(directory: Path, concurrency: int, engine: TokenProvider | None = None) -> list[str]:
    """The digests of all packs of twenty steps, of which every other one has new weights."""
    digests: list[str] = []
    async with playing(directory, engine=engine) as field:
        field.fails = fails_by_index
        field.session = {"sampling": {"max_tokens": 4}}
        rules = StepRules(StepBudget(8, 4), concurrency=concurrency, group_filter=drop_zero_variance)
        source = field.source(training_seed=11)
        async with StepPipeline(source, rules, ScriptedLearner(), SegmentMaker(512), lookahead=2) as pipeline:
            for step in range(STEPS):
                trained = await pipeline.run(step, version=0)
                assert book_step(trained.packed).difference == 0
                digests += [pack.digest for pack in trained.packed.packs]
        assert field.sessions() == 0
    return digests


async def test_with_the_scripted_engine(tmp_path: Path):
    """With failures by index, and groups that a filter drops, among them."""
    played = {concurrency: await play(tmp_path / str(concurrency), concurrency) for concurrency in (1, 4, 32)}
    assert len(set(played[1])) == len(played[1]) >= STEPS
    assert played[1] == played[4] == played[32]


@pytest.mark.timeout(900)
async def test_with_the_local_engine(tmp_path: Path):
    """Ids and logprobs to the last bit: what else is in a batch changes no sample."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=toy_tokenizer().vocab_size,
        eos_token_id=2,
        bos_token_id=1,
        pad_token_id=0,
    )
    model = write_toy_model(tmp_path / "model")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(model)
    played = []
    for concurrency in (1, 32):
        engine = HuggingFaceTokenProvider(model, kv_cache_bytes=64 << 20, step_tokens=8192, shares_prefixes=False)
        played.append(await play(tmp_path / str(concurrency), concurrency, engine))
    assert len(set(played[0])) == len(played[0]) >= STEPS
    assert played[0] == played[1]

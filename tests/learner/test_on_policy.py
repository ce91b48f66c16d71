"""On the first pack of an on-policy step the learner's logprobs are those that the engine reported, token by token.

The whole way: a tiny model is warmed up by the learner, saved, loaded by the local engine, and talked to over a session
server for several turns; the samples become packs for the learner that saved it.
"""

import asyncio
from pathlib import Path

import httpx
import numpy as np
import torch

from harness import AgentTask, FunctionAgent, MemoryStore, Rollout, SessionManager, open_chat_tokenizer, serve
from harness.engines.huggingface import HuggingFaceTokenProvider
from harness.training import (
    LossKind,
    LossSettings,
    OptimizerSettings,
    Pack,
    Segment,
    TorchLearner,
    WholeSampleEncoder,
    plan_packs,
)
from harness.training.learner.packed_forward import packed_logprobs
from harness.types import Json
from tests.learner.tiny_models import tiny_model
from tests.toy_model import SPECIALS, write_toy_model

PACKING_LENGTH = 512


def write_model(directory: Path) -> Path:
    """Toy tokenizer, and a model that has learned to say little and to stop."""
    write_toy_model(directory)
    tokenizer = open_chat_tokenizer(directory).tokenizer
    model = tiny_model(
        dtype=torch.float32,
        hidden_size=32,
        initializer_range=0.1,
        vocab_size=len(SPECIALS) + 256,
        max_position_embeddings=1024,
        eos_token_id=2,
    )
    model.save_pretrained(directory)
    learner = TorchLearner.open(directory, LossSettings(LossKind.CROSS_ENTROPY), OptimizerSettings(learning_rate=0.01))
    words = ("yes", "no", "maybe so")
    turns = [
        f"<|im_start|>user\nAnd {n}?<|im_end|>\n<|im_start|>assistant\n{w}<|im_end|>\n" for n, w in enumerate(words)
    ]
    segments = [Segment.of_tokens(tokenizer.encode("".join(turns[n:] + turns[:n]))) for n in range(len(turns))]
    pack = Pack.of(segments, range(len(segments)))
    for _ in range(40):
        learner.finish_step(learner.accumulate(pack).trained_tokens)
    learner.save(directory / "warm")
    return directory / "warm"


async def talk(base_url: str, prompt: str, **_: object) -> Json:
    """Some turns, as long as the session continues."""
    messages: list[Json] = [{"role": "user", "content": prompt}]
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
        for turn in range(3):
            body = {"model": "m", "messages": messages, "max_tokens": 30}
            answer = await http.post(f"{base_url}/chat/completions", json=body)
            if answer.status_code != 200:
                break
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": f"And {turn}?"}]
    return {}


async def play(directory: Path, workdir: Path, rollouts: int, session: Json) -> list[Rollout]:
    """Rollouts of the model in `directory`, all at once."""
    engine = HuggingFaceTokenProvider(directory)
    async with (
        serve(engine, open_chat_tokenizer(directory), MemoryStore()) as server,
        SessionManager(server.url, engines=[engine]) as manager,
    ):
        agent = FunctionAgent("talk", talk)
        tasks = [AgentTask(agent, f"And {n}?", workdir / str(n), "m", session=session) for n in range(rollouts)]
        return await asyncio.gather(*map(manager.run, tasks))


async def test_the_learner_finds_the_logprobs_that_the_engine_reported(tmp_path: Path) -> None:
    """To 1e-4, for every trained token of conversations of several turns: ratios are 1, and nothing is clipped."""
    directory = write_model(tmp_path / "model")
    rollouts = await play(directory, tmp_path, 8, {})
    samples = [(rollout, sample) for rollout in rollouts for sample in rollout.samples]
    assert max(int((sample.loss_mask[:-1] < sample.loss_mask[1:]).sum()) for _, sample in samples) >= 1, "one turn each"
    encoded = [WholeSampleEncoder().encode(rollout, sample).segment for rollout, sample in samples]
    segments = [segment.with_advantage(1.0) for segment in encoded if segment is not None]
    packs = [
        Pack.of([segments[place] for place in places], places)
        for places in plan_packs([len(segment) for segment in segments], PACKING_LENGTH)
    ]
    assert 1 < len(packs) < len(segments)

    learner = TorchLearner.open(directory, LossSettings(LossKind.GRPO), OptimizerSettings())
    for pack in packs:
        with torch.no_grad():
            found = packed_logprobs(learner.model, pack).numpy()
        np.testing.assert_allclose(found, pack.behavior_logprobs[pack.logit_positions + 1], rtol=0, atol=1e-4)
    sums = learner.accumulate(packs[0])
    assert sums.compared_tokens == sums.trained_tokens > 20
    assert abs(sums.ratio / sums.compared_tokens - 1) < 1e-4
    assert sums.kl < 1e-6
    assert sums.clipped_tokens == 0

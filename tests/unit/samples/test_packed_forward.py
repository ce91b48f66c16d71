"""A forward pass over a pack, with a real model: the logprobs that an engine reported stand where the columns say."""

import asyncio
import uuid
from pathlib import Path

import numpy as np
import pytest

from harness.engines.huggingface import HuggingFaceTokenProvider
from harness.training import Pack, Segment, plan_packs
from harness.types import GenerationRequest, GenerationResult, SamplingParams, as_ids
from tests.builders import sample
from tests.local_model import LOCAL_ENGINE_GROUP

pytestmark = [pytest.mark.model, LOCAL_ENGINE_GROUP]

PACKING_LENGTH = 64
ANSWERS = ((3, 5), (9, 20), (17, 12), (2, 1), (30, 25), (11, 8), (5, 16))
"""Tokens of each prompt, and of its answer."""


async def sample_answers(folder: Path) -> list[Segment]:
    """Segments of answers that the model in `folder` samples."""
    async with HuggingFaceTokenProvider(folder) as engine:
        results = await asyncio.gather(
            *(
                engine.generate(
                    GenerationRequest(
                        as_ids(np.random.default_rng(seed).integers(100, 40_000, prompt)),
                        SamplingParams(answer, seed=seed, ignore_eos=True),
                        uuid.uuid4().hex,
                    )
                )
                for seed, (prompt, answer) in enumerate(ANSWERS)
            )
        )
    return [segment_of(result) for result in results]


def segment_of(result: GenerationResult) -> Segment:
    """The prompt as context, the output as what is trained."""
    versions = as_ids(np.zeros(result.output_ids.size, dtype=np.int32))
    return Segment.of_sample(
        sample(
            tokens=as_ids(np.concatenate([result.input_ids, result.output_ids])),
            response_length=result.output_ids.size,
            loss_mask=np.ones(result.output_ids.size, dtype=np.uint8),
            rollout_log_probs=result.logprobs,
            behavior_versions=versions,
            proximal_logprobs=result.logprobs,
            proximal_versions=versions,
        )
    )


def is_visible(pack: Pack) -> np.ndarray:
    """Which token sees which, shape [n, n]: those before it, in its own segment."""
    owner = np.repeat(np.arange(pack.numbers.size), np.diff(pack.cu_seqlens))
    return np.tril(owner[:, None] == owner[None, :])


async def test_a_packed_forward_gives_the_logprobs_that_the_engine_reported(small_dir: Path) -> None:
    """Of every trained token of every pack; and not when segments see each other."""
    import torch
    from transformers import AutoModelForCausalLM

    segments = await sample_answers(small_dir)
    model = AutoModelForCausalLM.from_pretrained(small_dir, dtype=torch.float32).eval()

    def logprobs_of(pack: Pack, visible: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            logits = model(
                torch.from_numpy(pack.ids.astype(np.int64))[None],
                attention_mask=torch.from_numpy(visible)[None, None],
                position_ids=torch.from_numpy(pack.position_ids.astype(np.int64)),
                use_cache=False,
            ).logits[0]
        at = torch.from_numpy(pack.logit_positions)
        return logits[at].log_softmax(-1)[torch.arange(at.numel()), pack.ids[pack.logit_positions + 1]].numpy()

    packs = [
        Pack.of([segments[place] for place in places], places)
        for places in plan_packs([len(segment) for segment in segments], PACKING_LENGTH)
    ]
    assert len(packs) < len(segments)
    for pack in packs:
        reported = pack.behavior_logprobs[pack.logit_positions + 1]
        np.testing.assert_allclose(logprobs_of(pack, is_visible(pack)), reported, atol=1e-4)
    widest = max(packs, key=lambda pack: pack.numbers.size)
    everything = np.tril(np.ones((len(widest), len(widest)), dtype=bool))
    assert abs(logprobs_of(widest, everything) - widest.behavior_logprobs[widest.logit_positions + 1]).max() > 1e-3

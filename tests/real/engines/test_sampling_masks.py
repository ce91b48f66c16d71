"""Masks of real SGLang: the learner's logprobs over the candidates of each token are those that the engine reported."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.engines.recorded_rows import check_masks
from harness.engines.remote.sglang import SGLangTokenProvider
from harness.errors import EngineRejected
from harness.sampling_masks import SampleMasks
from harness.token_rows import TurnRows
from harness.tokens.tokenizer import Tokenizer
from harness.training import LossKind, LossSettings, OptimizerSettings, Pack, Segment, TorchLearner
from harness.training.learner.packed_forward import packed_logprobs
from harness.types import GenerationRequest, GenerationResult, SamplingParams, as_ids


def segment_of(result: GenerationResult) -> Segment:
    """All that was sampled is trained."""
    prompt, output = result.input_ids.size, result.output_ids.size
    assert result.masks is not None
    ids = np.concatenate([result.input_ids, result.output_ids])
    columns = [np.concatenate([np.zeros(prompt), column]) for column in (np.ones(output), result.logprobs)]
    mask, logprobs, versions = *columns, np.concatenate([np.full(prompt, -1), np.zeros(output)])
    masks = SampleMasks.of_turns([TurnRows(prompt, (result.masks,))], 0, len(ids))
    return Segment(ids, mask, mask, logprobs, logprobs, versions, versions, masks)


async def test_the_learner_finds_the_logprobs_over_the_masks_of_sglang(sglang_url: str, model_dir: Path) -> None:
    """To 1e-5 in the mean, for top-p alone and with top-k, whole and in pieces; without the masks it does not."""
    vocab_size = Tokenizer.load(model_dir).vocab_size
    prompt = as_ids(Tokenizer.load(model_dir).encode("The three largest cities of the world are"))
    results = []
    async with SGLangTokenProvider(sglang_url, vocab_size=vocab_size) as provider:
        able = provider.capabilities
        assert able.max_mask_ids == 4096
        for number, (top_p, top_k) in enumerate([(0.9, 0), (0.7, 0), (0.95, 20), (1.0, 5)] * 2):
            params = SamplingParams(24, top_p=top_p, top_k=top_k, ignore_eos=True, sampling_mask=True)
            streams = (lambda _: None) if number >= 4 else None
            request = GenerationRequest(prompt, params, f"{number:032x}", on_delta=streams)
            result = check_masks(able.engine, vocab_size, able.max_mask_ids, request, await provider.generate(request))
            assert result.masks is not None
            assert result.masks.values.dtype == np.uint16
            assert np.diff(result.masks.offsets).max() <= (top_k or 4096)
            results.append(result)
        with pytest.raises(EngineRejected, match="top_k"):
            await provider.generate(
                GenerationRequest(prompt, SamplingParams(4, top_k=5000, sampling_mask=True), f"{9:032x}")
            )

    learner = TorchLearner.open(model_dir, LossSettings(LossKind.GRPO), OptimizerSettings())
    differences, without = [], []
    for result in results:
        segment = segment_of(result)
        with torch.no_grad():
            found = packed_logprobs(learner.model, Pack.of([segment], [0])).numpy()
            bare = packed_logprobs(learner.model, Pack.of([replace(segment, sampling_mask=None)], [0])).numpy()
        differences.append(np.abs(found - result.logprobs))
        without.append(np.abs(bare - result.logprobs))
    # Two implementations round float32 differently: raw logprobs differ by as much.
    assert np.mean(differences) < 1e-5
    assert np.max(differences) < 1e-4
    assert np.mean(without) > 1e-2

"""Over the candidates of a token, learner and engine have one logprob: packed or alone, and its gradient too."""

import asyncio
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from harness import Sample
from harness.errors import SegmentError
from harness.sampling_masks import SampleMasks
from harness.token_rows import RaggedRows, TurnRows
from harness.training import LossKind, LossSettings, OptimizerSettings, Pack, Segment, TorchLearner
from harness.training.learner.packed_forward import packed_logprobs
from harness.types import Json
from tests.learner.test_on_policy import play
from tests.learner.tiny_models import VOCABULARY, gradient, some_segments, tiny_model
from tests.toy_model import SPECIALS, write_toy_model


def with_masks(segment: Segment, seed: int) -> Segment:
    """Candidates for most trained tokens, the token among them."""
    rng = np.random.default_rng(seed)
    rows = [
        [token, *rng.choice(np.delete(np.arange(VOCABULARY), token), rng.integers(0, 9), replace=False)]
        if is_trained and rng.random() < 0.8
        else []
        for token, is_trained in zip(segment.ids.tolist(), segment.loss_mask, strict=True)
    ]
    turn = TurnRows(0, (RaggedRows.of(0, rows),))
    return replace(segment, sampling_mask=SampleMasks.of_turns([turn], 0, len(segment)))


def plain_over_masks(model: Any, segment: Segment) -> torch.Tensor:
    """Logprobs of the trained tokens by the model's own forward pass and a softmax over each mask."""
    tokens = torch.from_numpy(segment.ids.astype(np.int64))
    logits, masks, found = model(tokens[None]).logits[0], segment.sampling_mask, []
    assert masks is not None
    for at in np.flatnonzero(segment.loss_mask).tolist():
        mask = masks.values[masks.offsets[at] : masks.offsets[at + 1]].tolist() or range(VOCABULARY)
        found.append(logits[at - 1][list(mask)].log_softmax(-1)[list(mask).index(int(tokens[at]))])
    return torch.stack(found)


def test_logprobs_and_gradients_of_a_pack_are_over_the_masks_of_its_segments() -> None:
    """Tokens without a mask have the whole vocabulary beside them, segments without masks too."""
    model = tiny_model()
    segments = [with_masks(each, seed) for seed, each in enumerate(some_segments(model, (9, 4, 17, 6)))]
    bare = [replace(each, sampling_mask=None) for each in some_segments(model, (5,))]
    learner = TorchLearner(model, LossSettings(), OptimizerSettings())
    pack = Pack.of([*segments, *bare], range(5))

    packed = packed_logprobs(learner.model, pack)
    packed.square().sum().backward()
    plain = tiny_model()
    none = [replace(each, sampling_mask=SampleMasks.of_turns((), 0, len(each))) for each in bare]
    alone = torch.cat([plain_over_masks(plain, each) for each in (*segments, *none)])
    alone.square().sum().backward()

    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-9)
    torch.testing.assert_close(gradient(model), gradient(plain), rtol=1e-6, atol=1e-9)


def test_packs_hold_the_masks_of_their_segments() -> None:
    """Split again, cut, and told apart by their digest."""
    segments = [with_masks(each, seed) for seed, each in enumerate(some_segments(tiny_model(), (9, 6)))]
    pack = Pack.of(segments, range(2))

    for mine, own in zip(pack.segments(), segments, strict=True):
        assert mine.sampling_mask is not None
        assert own.sampling_mask is not None
        assert mine.sampling_mask.to_plain() == own.sampling_mask.to_plain()
    first = segments[0].first(4).sampling_mask
    assert first is not None
    assert len(first.states) == 4
    bare = Pack.of([replace(each, sampling_mask=None) for each in segments], range(2))
    assert bare.sampling_mask is None
    assert bare.digest() != pack.digest()
    with pytest.raises(SegmentError, match="sampling_mask has 9 masks for 6 tokens"):
        replace(segments[1], sampling_mask=segments[0].sampling_mask)


def write_model(directory: Path) -> Path:
    """Toy tokenizer, and a random model that prefers some tokens by far."""
    write_toy_model(directory)
    sizes = {"vocab_size": len(SPECIALS) + 256, "max_position_embeddings": 1024, "hidden_size": 32}
    model = tiny_model(dtype=torch.float32, initializer_range=0.3, eos_token_id=2, **sizes)
    model.save_pretrained(directory)
    return directory


FILTERS: list[Json] = [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.05}, {"top_p": 0.8, "top_k": 20, "min_p": 0.01}]


def test_the_learner_finds_the_logprobs_over_the_masks_of_the_local_engine(tmp_path: Path) -> None:
    """To 1e-5, packed, under each filter; every mask is the model's own, and most leave something out."""
    directory = write_model(tmp_path / "model")
    learner = TorchLearner.open(directory, LossSettings(LossKind.GRPO), OptimizerSettings())
    for number, sampling in enumerate(FILTERS):
        session = {"record": ["sampling_mask"], "sampling": {**sampling, "seed": number}}
        rollouts = asyncio.run(play(directory, tmp_path / str(number), 3, session))
        samples = [sample for each in rollouts for sample in each.samples]
        segments = [Segment.of_sample(each).with_advantage(1.0) for each in samples]
        pack = Pack.of(segments, range(len(segments)))
        with torch.no_grad():
            found = packed_logprobs(learner.model, pack).numpy()
        expected = pack.behavior_logprobs[pack.logit_positions + 1]
        assert expected.size > 50
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5, err_msg=str(sampling))
        bare = Pack.of([replace(each, sampling_mask=None) for each in segments], range(len(segments)))
        with torch.no_grad():
            assert np.abs(packed_logprobs(learner.model, bare).numpy() - expected).mean() > 1e-3
        require_true_masks(AutoModelForCausalLM.from_pretrained(directory), samples[0], sampling)


def require_true_masks(plain: Any, sample: Sample, sampling: Json) -> None:
    """The candidates of each sampled token are those that the definition of its filter leaves."""
    masks, start = sample.sampling_mask, sample.tokens.size - sample.response_length
    assert masks is not None
    with torch.no_grad():
        tokens = torch.from_numpy(sample.tokens.astype(np.int64))
        every = plain(tokens[None]).logits[0].softmax(-1).double().numpy()
    for at, (first, last) in enumerate(pairwise(masks.offsets)):
        if sample.behavior_versions[at] < 0:
            assert first == last
            continue
        likely = np.argsort(-every[start + at - 1])[: sampling.get("top_k", VOCABULARY + 1000)]
        mass = every[start + at - 1][likely] / every[start + at - 1][likely].sum()
        likely = likely[np.cumsum(mass) - mass < sampling.get("top_p", 1.0)]
        kept = every[start + at - 1][likely]
        true = likely[kept >= kept[0] * sampling.get("min_p", 0.0)]
        assert {*masks.values[first:last].tolist()} == {*true.tolist()}, f"token {at}"

"""The gradient of packs is the gradient of the same samples one by one, however they are packed, for every loss.

The reference computes each sample alone by the model's own forward pass, and its loss token by token with the formulas
of the papers; nothing of the learner is in it.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from harness.errors import LearnerError
from harness.training import Segment
from harness.training.learner.learner import LossKind, LossSettings, OptimizerSettings
from harness.training.learner.losses import LOSSES
from harness.training.learner.packed_forward import packed_logprobs
from harness.training.learner.torch_learner import TorchLearner
from tests.learner.tiny_models import (
    distance,
    gradient,
    in_packs,
    plain_logprobs,
    some_segments,
    tiny_model,
    tiny_qwen3_vl,
)

LOW, HIGH, CAP = 0.15, 0.3, 1.4


def loss_of_token(kind: LossKind, current: torch.Tensor, segment: Segment, at: int) -> torch.Tensor:
    """Of the token at `at`, whose logprob now is `current`."""
    advantage = float(segment.advantages[at])
    behavior, proximal = float(segment.behavior_logprobs[at]), float(segment.proximal_logprobs[at])
    if kind is LossKind.CROSS_ENTROPY or segment.behavior_versions[at] == -1:
        return -advantage * current
    weight = 1.0
    older = behavior
    if kind is LossKind.DECOUPLED_PPO:
        weight, older = min(math.exp(proximal - behavior), CAP), proximal
    ratio = torch.exp(current - older)
    number = float(ratio.detach())
    clipped = min(max(number, 1 - LOW), 1 + HIGH)
    if clipped * advantage < number * advantage:
        return current * 0 - weight * clipped * advantage
    return -weight * ratio * advantage


def gradient_one_by_one(model: Any, kind: LossKind, segments: Sequence[Segment]) -> tuple[float, torch.Tensor]:
    """The loss of all samples, and its gradient, flat."""
    model.zero_grad(set_to_none=True)
    total = 0.0
    for segment in segments:
        current = plain_logprobs(model, segment.ids)
        places = np.flatnonzero(segment.loss_mask).tolist()
        loss = torch.stack([loss_of_token(kind, current[at - 1], segment, at) for at in places]).sum()
        loss.backward()
        total += float(loss.detach())
    return total, gradient(model)


def new_learner(model: Any, kind: LossKind) -> TorchLearner:
    return TorchLearner(model, LossSettings(kind, LOW, HIGH, CAP), OptimizerSettings())


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)], ids=["float64", "float32"]
)
@pytest.mark.parametrize("kind", LossKind)
def test_the_gradient_of_packs_is_that_of_the_samples_one_by_one(
    kind: LossKind, dtype: torch.dtype, tolerance: float
) -> None:
    """For one to eight packs; the sums of the losses agree as well."""
    model = tiny_model(dtype=dtype)
    segments = some_segments(model)
    loss, expected = gradient_one_by_one(model, kind, segments)
    learner = new_learner(model, kind)
    for count in range(1, 9):
        packs = in_packs(segments, count)
        assert len(packs) == count
        sums = [learner.accumulate(pack).loss for pack in packs]
        assert distance(gradient(model), expected) < tolerance
        assert sum(sums) == pytest.approx(loss, rel=tolerance)
        learner.discard_step()


@pytest.mark.parametrize(
    ("config_class", "more"),
    [
        ("LlamaConfig", {"num_key_value_heads": 4}),
        ("MistralConfig", {"sliding_window": 4}),
        ("Qwen2Config", {}),
        ("Qwen3Config", {}),
    ],
    ids=["llama", "mistral, window 4", "qwen2", "qwen3"],
)
def test_families_of_models_do_not_change_that(config_class: str, more: dict[str, Any]) -> None:
    """Heads of one's own, a sliding window shorter than most segments, biases, norms of queries and keys."""
    model = tiny_model(config_class, **more)
    segments = some_segments(model)
    _, expected = gradient_one_by_one(model, LossKind.DECOUPLED_PPO, segments)
    learner = new_learner(model, LossKind.DECOUPLED_PPO)
    for pack in in_packs(segments, 3):
        learner.accumulate(pack)
    assert distance(gradient(model), expected) < 1e-9


@pytest.mark.parametrize("rows", [1, 4])
def test_a_model_of_text_and_images_takes_packs_of_text(rows: int) -> None:
    """Logprobs and gradients of Qwen3-VL; its vision tower has no part in them."""
    model = tiny_qwen3_vl()
    segments = some_segments(model)
    expected = {segment.ids.tobytes(): plain_logprobs(model, segment.ids).detach() for segment in segments}
    _, gradient_alone = gradient_one_by_one(model, LossKind.GRPO, segments)
    learner = new_learner(model, LossKind.GRPO)
    for pack in in_packs(segments, 3, rows):
        assert pack.position_ids.shape == (rows, len(pack))
        trained = [
            expected[segment.ids.tobytes()][np.flatnonzero(segment.loss_mask) - 1] for segment in pack.segments()
        ]
        assert float((packed_logprobs(model, pack) - torch.cat(trained)).detach().abs().max()) < 1e-6
        learner.accumulate(pack)
    assert distance(gradient(model), gradient_alone) < 1e-6


def test_every_part_of_the_formulas_is_met() -> None:
    """Clipped, unclipped and capped tokens, and appended ones: comparisons without them would say little."""
    model = tiny_model()
    segments = some_segments(model)
    sums = new_learner(model, LossKind.DECOUPLED_PPO).accumulate(in_packs(segments, 1)[0])
    assert 0 < sums.clipped_tokens < sums.compared_tokens < sums.trained_tokens
    assert 0 < sums.capped_tokens < sums.compared_tokens
    assert LOSSES.keys() == set(LossKind)


@pytest.mark.parametrize(
    ("config_class", "more", "reason"),
    [
        ("Gemma2Config", {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4}, "softcap"),
        ("MambaConfig", {"state_size": 4}, "cannot be trained on packs"),
    ],
)
def test_a_model_that_packs_cannot_be_trained_on_is_refused(
    config_class: str, more: dict[str, Any], reason: str
) -> None:
    """Attention with more than is known here, and state that runs on from one segment into the next."""
    with pytest.raises(LearnerError, match=reason):
        new_learner(tiny_model(config_class, **more), LossKind.PPO)

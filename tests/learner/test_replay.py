"""A learner in another precision sends each token to the experts that it was sampled with, forward and backward."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from harness.errors import LearnerError
from harness.token_rows import RowState, SampleRows
from harness.training import Pack, Segment
from harness.training.learner.learner import LossKind, LossSettings, OptimizerSettings
from harness.training.learner.packed_forward import packed_logprobs, replaying
from harness.training.learner.torch_learner import TorchLearner
from tests.learner.tiny_models import distance, gradient, in_packs, plain_logprobs, tiny_model
from tests.plain_experts import MIXTURES, experts_of, new_mixture

LENGTHS = (9, 40, 3, 17, 25)
LOSS, OPTIMIZER = LossSettings(LossKind.CROSS_ENTROPY), OptimizerSettings()


@pytest.fixture(name="kind", params=MIXTURES)
def _kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def segments_of(model: Any, lengths: Sequence[int] = LENGTHS) -> list[Segment]:
    """Random tokens, all but the first trained, with the experts that `model` chooses for all but the last."""
    segments = []
    for length in lengths:
        ids = np.random.default_rng(length).integers(3, 259, length).astype(np.int32)
        experts = experts_of(model, ids)
        states = np.full(length, RowState.PRESENT, np.uint8)
        states[-1] = RowState.NOT_READ
        rows = SampleRows(experts.astype(np.uint16 if experts.max() > 255 else np.uint8), states)
        segments.append(replace(Segment.of_tokens(ids), routed_experts=rows))
    return segments


def plain_replay(model: Any, segment: Segment) -> torch.Tensor:
    """Logprobs of a segment alone, by transformers' pass with each router written out for the rows."""
    rows = segment.routed_experts
    assert rows is not None

    def route(layer: int, router: Any):
        config = model.config
        is_softmax = config.model_type == "qwen3_moe"

        def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            hidden = hidden.reshape(-1, config.hidden_size)
            logits = torch.nn.functional.linear(hidden, router.weight)
            scores = logits.float().softmax(-1) if is_softmax else logits.sigmoid()
            own = scores.topk(config.num_experts_per_tok).indices
            experts = torch.from_numpy(rows.values[:, layer].astype(np.int64))
            experts[-1] = own[-1]
            chosen = scores.gather(1, experts)
            if config.norm_topk_prob:
                chosen = chosen / chosen.sum(-1, keepdim=True)
            return logits, chosen.to(logits.dtype), experts

        return forward

    routers = {layer: block.mlp.gate for layer, block in enumerate(model.model.layers) if hasattr(block.mlp, "gate")}
    try:
        for layer, router in routers.items():
            router.forward = route(layer, router)
        return plain_logprobs(model, segment.ids)
    finally:
        for router in routers.values():
            del router.forward


def plain_gradient(model: Any, segments: Sequence[Segment]) -> torch.Tensor:
    """Gradient of the sum of negative logprobs, segment by segment."""
    model.zero_grad()
    for segment in segments:
        (-plain_replay(model, segment).sum()).backward()
    return gradient(model)


def logprobs_by(learner: TorchLearner, pack: Pack) -> torch.Tensor:
    with replaying(learner._routers, pack.routed_experts, learner.model.device), torch.no_grad():
        return packed_logprobs(learner.model, pack)


def test_a_learner_in_another_precision_chooses_as_the_sampling_model_did(kind: str) -> None:
    """Without the rows it chooses otherwise; with them its logprobs are those of its own pass with that choice."""
    model, segments = new_mixture(kind), segments_of(new_mixture(kind).bfloat16())
    [pack] = in_packs(segments, 1)
    with torch.no_grad():
        alone = torch.cat([plain_logprobs(model, each.ids) for each in segments])
        forced = torch.cat([plain_replay(model, each) for each in segments])

    learner = TorchLearner(model, LOSS, OPTIMIZER)

    assert float((logprobs_by(learner, replace(pack, routed_experts=None)) - alone).abs().max()) < 1e-5
    assert float((forced - alone).abs().max()) > 1e-3, "both chose the same experts"
    assert float((logprobs_by(learner, pack) - forced).abs().max()) < 1e-5


@pytest.mark.parametrize("checkpoints", [False, True], ids=["kept", "computed again"])
def test_the_gradient_is_that_of_the_replayed_choice_and_reaches_the_gates(kind: str, checkpoints: bool) -> None:
    """However the segments are packed, and if the backward pass computes its activations again."""
    model, segments = new_mixture(kind), segments_of(new_mixture(kind).bfloat16())
    expected = plain_gradient(model, segments)
    learner = TorchLearner(model, LOSS, OPTIMIZER)
    if checkpoints:
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.train()

    for pack in in_packs(segments[::-1], 2):
        learner.accumulate(pack)

    assert distance(gradient(model), expected) < 1e-5
    gates = [each.grad for name, each in model.named_parameters() if name.endswith("gate.weight")]
    assert all(float(gate.abs().max()) > 0 for gate in gates)


def test_a_token_without_a_row_chooses_itself() -> None:
    """Beside tokens that have one, and in a segment without rows."""
    model, [first, second] = new_mixture("8 experts"), segments_of(new_mixture("8 experts", seed=1), (9, 12))
    rows = first.routed_experts
    assert rows is not None
    states = np.where(np.arange(9) < 4, RowState.PRESENT, RowState.LOST).astype(np.uint8)
    own = experts_of(model, first.ids).astype(np.uint8)
    cut = replace(first, routed_experts=replace(rows, states=states))
    told = replace(
        first, routed_experts=SampleRows(np.where(np.arange(9)[:, None, None] < 4, rows.values, own), states)
    )
    learner = TorchLearner(model, LOSS, OPTIMIZER)

    [pack, alone, free] = [
        logprobs_by(learner, Pack.of(segments, range(len(segments))))
        for segments in ([cut, replace(second, routed_experts=None)], [told], [replace(second, routed_experts=None)])
    ]

    assert float((pack - torch.cat([alone, free])).abs().max()) < 1e-5


def test_rows_of_another_model_are_refused() -> None:
    """By name of what differs, and before anything is trained."""
    [segment] = segments_of(new_mixture("8 experts"), (9,))
    more = replace(segment.routed_experts, values=segment.routed_experts.values + np.uint8(8))
    less = replace(segment.routed_experts, values=segment.routed_experts.values[:, :2])
    mixture, dense = (
        TorchLearner(new_mixture("8 experts"), LOSS, OPTIMIZER),
        TorchLearner(tiny_model(), LOSS, OPTIMIZER),
    )

    for learner, rows, message in (
        (dense, segment.routed_experts, "has no router"),
        (mixture, more, "3 layers x 2 experts below 8"),
        (mixture, less, r"got \[2, 2\]"),
    ):
        with pytest.raises(LearnerError, match=message):
            learner.accumulate(Pack.of([replace(segment, routed_experts=rows)], [0]))


def test_packs_keep_the_rows_of_their_segments() -> None:
    """In order, and in their digest; of another shape they are named so."""
    segments = segments_of(new_mixture("8 experts"))
    assert segments[1].routed_experts is not None
    small = replace(segments[1].routed_experts, values=segments[1].routed_experts.values[:, :1])
    pack = Pack.of(segments, range(len(segments)))
    other = Pack.of([segments[0], replace(segments[1], routed_experts=small)], [0, 1])

    for mine, theirs in zip(pack.segments(), segments, strict=True):
        assert mine.routed_experts is not None
        assert theirs.routed_experts is not None
        assert mine.routed_experts.equals(theirs.routed_experts)
    assert pack.digest() != replace(pack, routed_experts=None).digest()
    assert other.routed_experts is not None
    assert other.routed_experts.missing == {"not_read": 1, "other_shape": LENGTHS[1] - 1}

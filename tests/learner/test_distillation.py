"""The learner's divergence from a teacher is the true one, where the teacher gives its distribution."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import LearnerError
from harness.samples.packs import Pack
from harness.samples.segments import Segment
from harness.top_logprobs import TopLogprobs
from harness.training.learner.learner import LossKind, LossSettings, OptimizerSettings
from harness.training.learner.losses import distill, reverse_kl
from harness.training.learner.torch_learner import TorchLearner
from tests.learner.tiny_models import tiny_model

VOCABULARY = 7


def distributions(seed: int) -> torch.Tensor:
    """Logprobs of three tokens, float64."""
    return (4 * torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(seed)).double()).log_softmax(-1)


def top_of(logprobs: torch.Tensor, count: int) -> TopLogprobs:
    best, ids = logprobs.topk(count)
    return TopLogprobs(ids.numpy().astype(np.int32), best.numpy().astype(np.float32))


@given(st.integers(0, 10_000), st.integers(1, VOCABULARY))
def test_it_is_a_lower_bound_and_exact_over_the_whole_vocabulary(seed: int, count: int) -> None:
    """More of the teacher's tokens bring it closer; a policy equal to the teacher has none."""
    policy, teacher = distributions(seed), distributions(seed + 1)
    truth = (policy.exp() * (policy - teacher)).sum(-1)
    bounds = [reverse_kl(policy, top_of(teacher, each)) for each in (count, VOCABULARY)]
    assert (bounds[0] <= bounds[1] + 2e-3).all()
    torch.testing.assert_close(bounds[1], truth, atol=2e-3, rtol=0)
    torch.testing.assert_close(reverse_kl(teacher, top_of(teacher, count)), torch.zeros(3).double(), atol=2e-3, rtol=0)


@given(st.integers(0, 10_000), st.integers(1, VOCABULARY))
def test_its_gradient_leads_to_the_teacher(seed: int, count: int) -> None:
    """A small step against it lowers it, token by token; it is finite, also where the teacher is missing."""
    logits = (distributions(seed) / 2).requires_grad_()
    top = top_of(distributions(seed + 1), count)
    top.ids[1], top.logprobs[1] = -1, np.nan
    before = reverse_kl(logits, top)
    before.sum().backward()
    assert logits.grad is not None
    after = reverse_kl(logits.detach() - 1e-3 * logits.grad, top)
    assert (before[1], after[1], logits.grad[1].abs().sum()) == (0, 0, 0)
    assert (after <= before + 1e-9).all()
    assert torch.isfinite(logits.grad).all()


def test_ids_beyond_the_policys_vocabulary_belong_to_the_rest() -> None:
    """Servers of the same tokenizer may pad it by other numbers."""
    teacher = distributions(0)
    padded = torch.cat([teacher, torch.full((3, 2), -9.0)], dim=-1)
    found, known = (reverse_kl(distributions(1), top_of(each, size)) for each, size in ((padded, 9), (teacher, 7)))
    torch.testing.assert_close(found, known, atol=0.05, rtol=0)


def test_a_pack_keeps_each_teachers_rows_at_their_tokens() -> None:
    """Over segments with and without that teacher; a weight without rows adds nothing."""
    tops, logits = top_of(distributions(0), 2), distributions(1)
    taught = replace(Segment.of_tokens([1, 2, 3]), teacher_tops={"big": tops})
    pack = Pack.of([Segment.of_tokens([4, 5]), taught, taught.first(2)], [0, 1, 2])
    assert [segment.teacher_tops.keys() for segment in pack.segments()] == [{"big"}] * 3
    trained = logits[[0, 1, 2, 1]]
    expected = reverse_kl(trained[1:], TopLogprobs(tops.ids[[1, 2, 1]], tops.logprobs[[1, 2, 1]]))
    found = distill({"big": 2.0, "small": 1.0}, pack, trained)
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(found, torch.cat([torch.zeros(1), 2.0 * expected]))
    assert distill({"small": 1.0}, pack, trained) == 0.0
    bare = [replace(segment, teacher_tops={}) for segment in pack.segments()]
    assert pack.digest() != Pack.of(bare, [0, 1, 2]).digest()


def test_a_teacher_without_a_weight_is_refused() -> None:
    """Its advantages were left out for the sake of the loss."""
    taught = replace(Segment.of_tokens([1, 2, 3]), teacher_tops={"big": top_of(distributions(0), 2)})
    learner = TorchLearner(tiny_model(), LossSettings(LossKind.CROSS_ENTROPY), OptimizerSettings())
    with pytest.raises(LearnerError, match="for each teacher with top_k, got none for big"):
        learner.accumulate(Pack.of([taught], [0]))

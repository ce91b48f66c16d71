"""Each loss on tokens whose value and slope can be written down by hand."""

import math
from collections.abc import Sequence

import pytest
import torch

from harness.errors import LearnerError
from harness.training.learner.learner import LossKind, LossSettings, OptimizerSettings
from harness.training.learner.losses import TrainedTokens, loss_of

RATIO_LOSSES = [LossKind.PPO, LossKind.GRPO, LossKind.DECOUPLED_PPO]


def losses_and_slopes(
    settings: LossSettings,
    ratios: Sequence[float],
    *,
    advantage: float = 1.0,
    weight: float = 1.0,
    is_sampled: bool = True,
) -> tuple[list[float], list[float]]:
    """Loss of each token, and its derivative by the token's logprob.

    The behavior policy gave each token a logprob of -2, the proximal one `weight` times that probability, and the
    policy that is trained `ratios` times the probability of the older policy of the loss.
    """
    behavior = torch.full((len(ratios),), -2.0, dtype=torch.float64)
    proximal = behavior + math.log(weight)
    older = proximal if settings.kind is LossKind.DECOUPLED_PPO else behavior
    logprobs = (older + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    advantages = torch.full_like(behavior, advantage)
    sampled = torch.full((len(ratios),), is_sampled)
    loss = loss_of(settings)(TrainedTokens(logprobs, behavior, proximal, advantages, sampled)).loss
    (slopes,) = torch.autograd.grad(loss.sum(), logprobs)
    return loss.tolist(), slopes.tolist()


@pytest.mark.parametrize("kind", RATIO_LOSSES)
def test_a_ratio_outside_of_its_range_is_clipped_on_the_side_that_the_advantage_pushes_to(kind: LossKind) -> None:
    """What would go further has no slope; what comes back has its full one."""
    settings = LossSettings(kind, clip_low=0.2, clip_high=0.3)
    ratios = [0.5, 0.9, 1.0, 1.2, 2.0]
    losses, slopes = losses_and_slopes(settings, ratios, advantage=2.0)
    assert losses == pytest.approx([-1.0, -1.8, -2.0, -2.4, -2.6])
    assert slopes == pytest.approx([-1.0, -1.8, -2.0, -2.4, 0.0])
    losses, slopes = losses_and_slopes(settings, ratios, advantage=-2.0)
    assert losses == pytest.approx([1.6, 1.8, 2.0, 2.4, 4.0])
    assert slopes == pytest.approx([0.0, 1.8, 2.0, 2.4, 4.0])


def test_cross_entropy_is_minus_the_logprob_times_the_advantage() -> None:
    """Whatever the older policies thought of the token."""
    losses, slopes = losses_and_slopes(LossSettings(LossKind.CROSS_ENTROPY), [0.5, 2.0], advantage=3.0)
    assert losses == pytest.approx([-3.0 * (-2 + math.log(ratio)) for ratio in (0.5, 2.0)])
    assert slopes == pytest.approx([-3.0, -3.0])


@pytest.mark.parametrize(("weight", "counts"), [(0.25, 0.25), (1.0, 1.0), (1.7, 1.7), (5.0, 1.8)])
def test_decoupled_ppo_weighs_by_the_ratio_of_the_older_policies_up_to_the_cap(weight: float, counts: float) -> None:
    """The weight multiplies value and slope, and has no slope of its own."""
    settings = LossSettings(LossKind.DECOUPLED_PPO, weight_cap=1.8)
    losses, slopes = losses_and_slopes(settings, [1.1], advantage=2.0, weight=weight)
    assert losses == pytest.approx([-2.2 * counts])
    assert slopes == pytest.approx([-2.2 * counts])


def test_a_token_that_never_met_its_next_version_has_the_loss_of_ppo() -> None:
    """Its proximal logprob is its behavior logprob: weight 1, and one older policy."""
    ratios = [0.5, 0.9, 1.0, 1.2, 2.0]
    decoupled = losses_and_slopes(LossSettings(LossKind.DECOUPLED_PPO), ratios, advantage=-0.7)
    assert decoupled == losses_and_slopes(LossSettings(LossKind.PPO), ratios, advantage=-0.7)


@pytest.mark.parametrize("kind", RATIO_LOSSES)
def test_a_token_that_nobody_sampled_is_trained_by_cross_entropy(kind: LossKind) -> None:
    """Its advantage is the weight, and nothing is clipped; it is in no figure of ratios."""
    appended = losses_and_slopes(LossSettings(kind), [0.1, 9.0], advantage=1.5, is_sampled=False)
    assert appended[1] == pytest.approx([-1.5, -1.5])
    plain = losses_and_slopes(LossSettings(LossKind.CROSS_ENTROPY), [0.1, 9.0], advantage=1.5, is_sampled=False)
    assert appended[0] == pytest.approx(plain[0])
    assert appended[1] == pytest.approx(plain[1])


@pytest.mark.parametrize(
    "bounds", [{"clip_low": -0.1}, {"clip_low": 1.5}, {"clip_high": -0.1}, {"weight_cap": 0.0}, {"clip_low": math.nan}]
)
def test_bounds_that_are_none_are_refused(bounds: dict[str, float]) -> None:
    """By name."""
    with pytest.raises(LearnerError, match=next(iter(bounds))):
        LossSettings(**bounds)


@pytest.mark.parametrize("wrong", [{"learning_rate": -1.0}, {"beta1": 1.0}, {"clip_norm": 0.0}, {"beta2": math.nan}])
def test_settings_that_no_optimizer_takes_are_refused(wrong: dict[str, float]) -> None:
    """By name."""
    with pytest.raises(LearnerError, match=next(iter(wrong))):
        OptimizerSettings(**wrong)

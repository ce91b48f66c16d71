"""Losses of trained tokens. Each is a value per token; a learner sums them up and normalizes once per step.

With pi the policy that is trained, A the advantage of a token, r = pi / older policy, and c(r) = r between 1 - clip_low
and 1 + clip_high:

    cross_entropy    -A ln pi
    ppo, grpo        -min(r A, c(r) A)       older policy: the behavior policy
    decoupled_ppo    -w min(r A, c(r) A)     older policy: the proximal policy

    with w = min(proximal policy / behavior policy, weight_cap)

A token that nobody sampled (behavior version -1) has no older policy. It is trained by cross-entropy in every loss,
with its advantage as the weight.

A token that never met its next policy has its behavior logprob as the proximal one, so its weight is 1 and decoupled
PPO is PPO there. The weight is a number, not a function of pi: no gradient passes through it.

Sources: PPO, Schulman et al. 2017 (arXiv 1707.06347), without a value function: advantages come with the pack. GRPO,
Shao et al. 2024 (arXiv 2402.03300), with the sum over tokens of DAPO (Yu et al. 2025, arXiv 2503.14476) and Dr. GRPO
(Liu et al. 2025, arXiv 2503.20783) in the place of a mean per answer, and without a term for a reference policy.
Decoupled PPO, Hilton et al. 2021 (arXiv 2110.00641), with behavior policies that change inside an answer as in AReaL
(Fu et al. 2025, arXiv 2505.24298). A weight above the cap counts as the cap, like the truncated weights of IMPALA
(Espeholt et al. 2018, arXiv 1802.01561); AReaL leaves such tokens out.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from harness.learner.settings import LossKind, LossSettings
from harness.samples.packs import Pack
from harness.samples.versions import NOT_SAMPLED


class TrainedTokens(NamedTuple):
    """The trained tokens of a pack, in order: tensors of shape [t], all but `is_sampled` of the dtype of `logprobs`."""

    logprobs: Tensor
    """Under the policy that is trained; the one that has a gradient."""
    behavior_logprobs: Tensor
    proximal_logprobs: Tensor
    advantages: Tensor
    is_sampled: Tensor
    """Bool: a policy sampled the token, so it has a ratio."""

    @classmethod
    def of(cls, pack: Pack, logprobs: Tensor) -> "TrainedTokens":
        """`logprobs`, shape [t], are those of the tokens behind `pack.logit_positions`."""
        trained = pack.logit_positions + 1

        def column(name: str) -> Tensor:
            return torch.from_numpy(getattr(pack, name)[trained]).to(logprobs)

        is_sampled = torch.from_numpy(pack.behavior_versions[trained] != NOT_SAMPLED).to(logprobs.device)
        return cls(logprobs, column("behavior_logprobs"), column("proximal_logprobs"), column("advantages"), is_sampled)


class TokenLosses(NamedTuple):
    """What a loss says of each trained token; tensors of shape [t]. All but `loss` are figures, without a gradient."""

    loss: Tensor
    """To be summed, and to be made small."""
    is_compared: Tensor
    """Bool: the token has a ratio. The figures below mean something for these only."""
    ratio: Tensor
    log_ratio: Tensor
    is_clipped: Tensor
    weight: Tensor
    is_capped: Tensor


Loss = Callable[[TrainedTokens], TokenLosses]
"""A loss of one's own is a function of this type."""


def cross_entropy(tokens: TrainedTokens, settings: LossSettings) -> TokenLosses:  # noqa: ARG001
    """Minus the logprob, weighed by the advantage: 1 to imitate; with an advantage of rewards this is REINFORCE."""
    nothing = torch.zeros_like(tokens.is_sampled)
    ones = torch.ones_like(tokens.advantages)
    return TokenLosses(-tokens.advantages * tokens.logprobs, nothing, ones, ones - 1, nothing, ones, nothing)


def ppo(tokens: TrainedTokens, settings: LossSettings) -> TokenLosses:
    """The clipped ratio to the policy that sampled the token."""
    return _clip(tokens, settings, tokens.behavior_logprobs, torch.ones_like(tokens.advantages))


def grpo(tokens: TrainedTokens, settings: LossSettings) -> TokenLosses:
    """PPO's, token by token; GRPO is in the advantages: (reward - mean) / deviation in a group of one prompt."""
    return ppo(tokens, settings)


def decoupled_ppo(tokens: TrainedTokens, settings: LossSettings) -> TokenLosses:
    """The clipped ratio to the policy after the one that sampled the token, weighed by the ratio of those two."""
    weight = (tokens.proximal_logprobs - tokens.behavior_logprobs).exp()
    return _clip(tokens, settings, tokens.proximal_logprobs, weight)


LOSSES: Mapping[LossKind, Callable[[TrainedTokens, LossSettings], TokenLosses]] = {
    LossKind.CROSS_ENTROPY: cross_entropy,
    LossKind.PPO: ppo,
    LossKind.GRPO: grpo,
    LossKind.DECOUPLED_PPO: decoupled_ppo,
}


def loss_of(settings: LossSettings) -> Loss:
    """The loss that `settings` name."""
    function = LOSSES[settings.kind]
    return lambda tokens: function(tokens, settings)


def _clip(tokens: TrainedTokens, settings: LossSettings, older_logprobs: Tensor, weight: Tensor) -> TokenLosses:
    log_ratio = tokens.logprobs - older_logprobs
    ratio = log_ratio.exp()
    gain = ratio * tokens.advantages
    clipped_gain = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high) * tokens.advantages
    capped_weight = weight.clamp(max=settings.weight_cap)
    return TokenLosses(
        loss=torch.where(
            tokens.is_sampled,
            -capped_weight * torch.minimum(gain, clipped_gain),
            -tokens.advantages * tokens.logprobs,
        ),
        is_compared=tokens.is_sampled,
        ratio=ratio.detach(),
        log_ratio=log_ratio.detach(),
        is_clipped=(clipped_gain < gain).detach(),
        weight=capped_weight,
        is_capped=weight > settings.weight_cap,
    )

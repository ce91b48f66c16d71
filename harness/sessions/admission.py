"""Sampling parameters of a turn: the client's wishes, the rollout's overrides, the session's limits.

Limits only shorten an output. All depends on the arguments alone (I10).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from harness.errors import LimitReached, MalformedRequest, PromptTooLong
from harness.sessions.seeds import seed_of
from harness.tokens.matching import ChainKey
from harness.types import SamplingParams, SamplingWishes


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a session; None is unbounded."""

    turns: int | None = None
    """Failed turns included."""
    tokens_per_turn: int | None = None
    tokens_per_session: int | None = None
    """Prompt + output of any branch."""
    staleness: int | None = None
    """Weight updates since a branch's oldest token."""


class TurnPlace(NamedTuple):
    """Facts that limits and seed depend on."""

    turns_before: int
    prompt_length: int
    key: ChainKey
    ordinal: int


def plan_sampling(
    asked: SamplingWishes, overrides: SamplingWishes, limits: Limits, place: TurnPlace, context_length: int
) -> SamplingParams:
    """Return the engine's parameters. Raise `LimitReached` or `PromptTooLong`."""
    if limits.turns is not None and place.turns_before >= limits.turns:
        raise LimitReached(f"the session has used its {limits.turns} turns")
    if place.prompt_length >= context_length:
        raise PromptTooLong(
            f"the prompt has {place.prompt_length} tokens, the model's context is {context_length};"
            " shorten the conversation",
            tokens=place.prompt_length,
            context_length=context_length,
            param="messages",
        )
    if limits.tokens_per_session is not None and place.prompt_length >= limits.tokens_per_session:
        raise LimitReached(
            f"the conversation has {place.prompt_length} tokens, the session's limit is {limits.tokens_per_session}"
        )
    room = min(context_length, limits.tokens_per_session or context_length) - place.prompt_length
    budget = min(room, limits.tokens_per_turn or room)
    wishes = asked.override_with(overrides)
    most = min(budget, wishes.max_new_tokens or budget)
    stated = wishes.to_dict() | {"max_new_tokens": most, "min_new_tokens": min(most, wishes.min_new_tokens or 0)}
    if overrides.seed is not None:
        stated["seed"] = turn_seed(overrides.seed, place.key, place.ordinal)
    return SamplingParams(**stated)


def require_pinned(asked: SamplingWishes, overrides: SamplingWishes) -> None:
    """Raise `MalformedRequest` for a value that is not the session's, or without one the neutral value."""
    neutral = SamplingParams()
    for name in ("temperature", "top_p", "top_k", "min_p"):
        wished, owned = getattr(asked, name), getattr(overrides, name)
        pinned = getattr(neutral, name) if owned is None else owned
        if wished not in (None, pinned):
            raise MalformedRequest(
                f"{name}: expected {pinned:g}, the value of the session, whose logprobs are over its sampling masks;"
                f" got {wished:g}. Leave it out, or set it in the `sampling` of the session",
                param=name,
            )


def require_served(ignored: Sequence[str]) -> None:
    """Raise `MalformedRequest` for the first ignored field."""
    if ignored:
        raise MalformedRequest(
            f"{ignored[0]}: expected none in a strict session, the server does not serve it; leave it out, or create"
            " the session without `strict`",
            param=ignored[0],
        )


def require_fresh(limits: Limits, oldest: int | None, live: int) -> None:
    """Raise `LimitReached` if version `oldest` is too old."""
    if oldest is not None and is_too_old(limits, oldest, live):
        raise LimitReached(
            f"the branch began under weight version {oldest}, {live - oldest} updates ago; the session's limit is"
            f" {limits.staleness}"
        )


def is_too_old(limits: Limits, oldest: int | None, live: int) -> bool:
    """Return True if `live` is past the staleness limit."""
    return limits.staleness is not None and oldest is not None and live - oldest > limits.staleness


def turn_seed(session_seed: int, key: ChainKey, ordinal: int) -> int:
    """Return a seed that differs per turn and re-sample, but not per run."""
    # By content, not time: side calls that race keep their seeds.
    return seed_of(f"{session_seed},{ordinal},".encode() + key)

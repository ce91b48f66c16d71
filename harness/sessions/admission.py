"""What a turn may use: the client's wishes, the rollout's overrides and the session's limits, made into numbers.

The rollout decides how to sample: its parameters replace the agent's, and both are recorded. Limits only ever
shorten an output. Every decision here depends on its arguments alone (I10).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from hashlib import blake2b
from typing import Any

from harness.errors import LimitReached, PromptTooLong
from harness.types import SamplingParams

_SEED_BITS = 63


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a session; None is unbounded."""

    turns: int | None = None
    """Model calls, side branches and failed ones included."""
    tokens_per_turn: int | None = None
    """Output tokens of one turn."""
    tokens_per_session: int | None = None
    """Prompt plus output of any branch: the longest sequence a sample may have."""


@dataclass(frozen=True, slots=True)
class SamplingWishes:
    """Sampling parameters somebody stated; None and empty mean that they did not.

    The same type holds what an agent asked for and what a rollout overrides.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None

    def stated(self) -> dict[str, Any]:
        """The parameters that were stated."""
        return {name: value for name, value in asdict(self).items() if value not in (None, ())}

    def overridden_by(self, other: "SamplingWishes") -> "SamplingWishes":
        """These wishes, with what `other` states in their place."""
        return replace(self, **other.stated())


@dataclass(frozen=True, slots=True)
class TurnPlace:
    """Where a turn would stand: what its limits and its seed depend on."""

    turns_before: int
    """Turns of the session admitted so far, in flight ones included."""
    prompt_length: int
    path: Sequence[int]
    """For each turn from the root down to this one, its ordinal among its siblings."""


@dataclass(frozen=True, slots=True)
class EngineBounds:
    """What the engine allows whatever a session asks for."""

    context_length: int
    max_top_logprobs: int = field(default=0)


def plan_sampling(
    asked: SamplingWishes, overrides: SamplingWishes, limits: Limits, place: TurnPlace, bounds: EngineBounds
) -> SamplingParams:
    """The parameters for the engine.

    Raises `LimitReached` when the session may not have another turn, `PromptTooLong` when the prompt leaves no room
    in the model's context.
    """
    budget = _token_budget(limits, place, bounds)
    wishes = asked.overridden_by(overrides)
    stated = wishes.stated() | {"max_new_tokens": min(budget, wishes.max_new_tokens or budget)}
    if overrides.seed is not None:
        stated["seed"] = turn_seed(overrides.seed, place.path)
    known = {parameter.name for parameter in fields(SamplingParams)}
    return SamplingParams(**{name: value for name, value in stated.items() if name in known})


def turn_seed(session_seed: int, path: Sequence[int]) -> int:
    """The seed of the turn at `path`: differs between turns and re-samples, the same in every run."""
    text = ",".join(map(str, (session_seed, *path)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> (64 - _SEED_BITS)


def _token_budget(limits: Limits, place: TurnPlace, bounds: EngineBounds) -> int:
    if limits.turns is not None and place.turns_before >= limits.turns:
        raise LimitReached(f"the session has used its {limits.turns} turns")
    if place.prompt_length >= bounds.context_length:
        raise PromptTooLong(
            f"the prompt has {place.prompt_length} tokens, the model's context is {bounds.context_length};"
            " shorten the conversation",
            param="messages",
        )
    if limits.tokens_per_session is not None and place.prompt_length >= limits.tokens_per_session:
        raise LimitReached(
            f"the conversation has {place.prompt_length} tokens, the session's limit is {limits.tokens_per_session}"
        )
    bound = min(bounds.context_length, limits.tokens_per_session or bounds.context_length) - place.prompt_length
    return min(bound, limits.tokens_per_turn or bound)

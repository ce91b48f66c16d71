"""The room that a turn has: the client's wishes, the rollout's overrides and the session's limits, made into numbers.

The rollout decides how to sample: its parameters replace the agent's, and both are recorded. Limits only ever
shorten an output. Every decision here depends on its arguments alone (I10).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.errors import LimitReached, MalformedRequest, PromptTooLong
from harness.sessions.seeds import seed_of
from harness.tokens.matching import ChainKey
from harness.types import SamplingParams, SamplingWishes


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a session; None is unbounded."""

    turns: int | None = None
    """Model calls, side branches and failed ones included."""
    tokens_per_turn: int | None = None
    """Output tokens of one turn."""
    tokens_per_session: int | None = None
    """Prompt plus output of any branch: the longest sequence a sample may have."""
    staleness: int | None = None
    """Weight updates since the oldest token of a branch was sampled; 0 ends every branch at the first update."""


@dataclass(frozen=True, slots=True)
class TurnPlace:
    """Where a turn would stand: what its limits and its seed depend on."""

    turns_before: int
    """Turns of the session admitted so far, in flight ones included."""
    prompt_length: int
    key: ChainKey
    """Digest of the request's whole conversation and tools."""
    ordinal: int
    """How many turns with this key were admitted before: 0, or the number of a re-sample."""


def plan_sampling(
    asked: SamplingWishes, overrides: SamplingWishes, limits: Limits, place: TurnPlace, context_length: int
) -> SamplingParams:
    """The parameters for the engine.

    Raises `LimitReached` when the session may not have another turn, `PromptTooLong` when the prompt leaves no room
    in the model's context.
    """
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


def require_served(ignored: Sequence[str]) -> None:
    """Raises `MalformedRequest` for the first field of a call that the server ignores: its session is strict."""
    if ignored:
        raise MalformedRequest(
            f"{ignored[0]}: expected none in a strict session, the server does not serve it; leave it out, or create"
            " the session without `strict`",
            param=ignored[0],
        )


def require_fresh(limits: Limits, oldest: int | None, live: int) -> None:
    """Raises `LimitReached` when a branch whose oldest token is of version `oldest` may not go on under `live`."""
    if oldest is not None and is_too_old(limits, oldest, live):
        raise LimitReached(
            f"the branch began under weight version {oldest}, {live - oldest} updates ago; the session's limit is"
            f" {limits.staleness}"
        )


def is_too_old(limits: Limits, oldest: int | None, live: int) -> bool:
    """Whether tokens of version `oldest` lie more updates behind the version `live` than `limits` allow."""
    return limits.staleness is not None and oldest is not None and live - oldest > limits.staleness


def turn_seed(session_seed: int, key: ChainKey, ordinal: int) -> int:
    """The seed of a turn: differs between turns and re-samples, the same in every run.

    It depends on what is asked, not on when: side calls of an agent that race with each other keep their seeds.
    """
    return seed_of(f"{session_seed},{ordinal},".encode() + key)

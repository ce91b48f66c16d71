"""Kept rollouts: scored rollouts as bytes. Round trips are exact, so packing again gives equal packs."""

from typing import Any

import msgspec

from harness.errors import Cause, RunError, StepError
from harness.samples.codec import sample_from_binary, sample_to_binary
from harness.samples.rollout import Outcome, OutcomeKind, Rollout
from harness.training.collector.rollout_index import GroupIndex, RolloutIndex, ScoredRollout
from harness.types import Json


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    index: tuple[int, int, int, int]
    session_id: str | None
    kind: OutcomeKind
    cause: Cause | None
    detail: str
    samples: list[dict[str, Any]]
    session: Json
    agent_result: Json | None
    seconds: float
    reward: float | None
    error: str


def to_bytes(scored: ScoredRollout) -> bytes:
    """Encode `scored` with its samples and session record."""
    group, rollout = scored.index.group, scored.rollout
    kept = _Kept(
        index=(group.step, group.number, scored.index.member, scored.index.attempt),
        session_id=rollout.session_id,
        kind=rollout.outcome.kind,
        cause=rollout.outcome.cause,
        detail=rollout.outcome.detail,
        samples=[sample_to_binary(sample) for sample in rollout.samples],
        session=rollout.session,
        agent_result=rollout.agent_result,
        seconds=rollout.seconds,
        reward=scored.reward,
        error=scored.error,
    )
    return msgspec.msgpack.encode(kept)


def from_bytes(blob: bytes) -> ScoredRollout:
    """Decode `to_bytes`. Raises `StepError` if damaged."""
    try:
        kept = msgspec.msgpack.decode(blob, type=_Kept)
        samples = tuple(sample_from_binary(sample) for sample in kept.samples)
    except (msgspec.MsgspecError, RunError) as error:
        raise StepError(f"a rollout that was kept is damaged: {error}") from error
    step, number, member, attempt = kept.index
    outcome = Outcome(kept.kind, kept.cause, kept.detail)
    return ScoredRollout(
        RolloutIndex(GroupIndex(step, number), member, attempt),
        Rollout(kept.session_id, outcome, samples, kept.session, kept.agent_result, kept.seconds),
        kept.reward,
        kept.error,
    )

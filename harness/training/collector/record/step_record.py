"""Step record: a line of `steps.jsonl` per committed step and rank, with every decision that depended on time.

With the record and its rollouts, which hold the tokens and are kept as bytes, `pack_again` reproduces a step digest for
digest.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Self

import msgspec

from harness.decoding import read_json, read_msgpack
from harness.errors import Cause, RunError, StepError
from harness.samples.codec import sample_from_binary, sample_to_binary
from harness.samples.packs import Pack
from harness.samples.rollout import Outcome, OutcomeKind, Rollout
from harness.samples.segments import Segment
from harness.sessions.ledger import Ledger
from harness.training.collector.groups import Advantage, GroupIndex, RolloutIndex, ScoredRollout
from harness.training.collector.segment_maker import SegmentMaker
from harness.training.collector.step_outcome import Disposition, PackedStep, SettledRollout
from harness.types import Json


class RecordedRollout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Rollout that ended or is carried."""

    group: GroupIndex
    member: int
    attempt: int = 0
    use: Disposition
    kind: OutcomeKind | None = None
    session_id: str | None = None
    reward: float | None = None
    cause: str = ""
    """Why it is not trained."""
    generated: int = 0
    """In its session."""

    @classmethod
    def of(cls, settled: SettledRollout) -> Self:
        return cls(
            group=settled.index.group,
            member=settled.index.member,
            attempt=settled.index.attempt,
            use=settled.use,
            kind=settled.kind,
            session_id=settled.session_id,
            reward=settled.reward,
            cause=settled.cause,
            generated=int(settled.ledger["generated"]),
        )

    @property
    def index(self) -> RolloutIndex:
        return RolloutIndex(self.group, self.member, self.attempt)


class RecordedSegment(NamedTuple):
    rollout: int
    """Position in `StepRecord.rollouts`."""
    sample: int
    advantage: Advantage


class RecordedPack(msgspec.Struct, frozen=True, kw_only=True):
    digest: str
    tokens: int
    segments: tuple[RecordedSegment, ...]


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    rollout_seed_base: int
    version: int
    """Live policy version at the hand-over."""
    groups: tuple[GroupIndex, ...]
    """In hand-over order."""
    rollouts: tuple[RecordedRollout, ...]
    dropped_groups: Mapping[str, int]
    """Filtered groups by reason."""
    ended_groups: tuple[GroupIndex, ...]
    """Over-sampled groups."""
    carried_groups: tuple[GroupIndex, ...]
    """Over-sampled groups that the next step continues."""
    packs: tuple[RecordedPack, ...]
    """In order."""
    encoder_counts: Mapping[str, int]
    normalizer: float
    ledger: Ledger
    """Sessions without a rollout are `interrupted`."""

    @classmethod
    def of(cls, packed: PackedStep, rollout_seed_base: int, ledger: Ledger) -> Self:
        collected = packed.collected
        places = {each.index: place for place, each in enumerate(collected.rollouts)}
        advantages = {(each.rollout, each.sample): each.advantage for each in packed.samples}
        packs = [
            RecordedPack(
                digest=pack.digest,
                tokens=pack.tokens,
                segments=tuple(
                    RecordedSegment(places[rollout], sample, advantages[rollout, sample])
                    for rollout, sample in pack.segments
                ),
            )
            for pack in packed.packs
        ]
        return cls(
            step=collected.step,
            rollout_seed_base=rollout_seed_base,
            version=packed.version,
            groups=collected.groups,
            rollouts=tuple(RecordedRollout.of(each) for each in collected.rollouts),
            dropped_groups=dict(collected.dropped),
            ended_groups=collected.ended_groups,
            carried_groups=tuple(each.index for each in collected.carried),
            packs=tuple(packs),
            encoder_counts=dict(packed.encoder_counts),
            normalizer=packed.normalizer,
            ledger=ledger,
        )

    @classmethod
    def read(cls, line: bytes | str) -> Self:
        """Decode a line. Raises `StepError`."""
        try:
            return read_json(line, cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StepError(f"expected the record of a step, got something else: {error}") from error

    def to_line(self) -> bytes:
        """Encode as JSON without a newline."""
        return msgspec.json.encode(self)


def pack_again(record: StepRecord, rollouts: Iterable[ScoredRollout], maker: SegmentMaker) -> list[Pack]:
    """Rebuild the packs of a step with a `maker` like the run's. Raises `StepError` if a rollout or digest differs."""
    by_index = {scored.index: scored for scored in rollouts}
    made: dict[int, dict[int, Segment]] = {}
    packs = []
    for number, recorded in enumerate(record.packs):
        for place, _, advantage in recorded.segments:
            if place in made:
                continue
            index = record.rollouts[place].index
            if index not in by_index:
                raise StepError(
                    f"step {record.step} cannot be packed again: {index} is not there; a run keeps the rollouts of its"
                    " last keep_steps steps"
                )
            parts = maker.make(by_index[index], advantage, record.version)
            made[place] = {part.facts.sample: part.segment for part in parts if part.segment is not None}
        try:
            segments = [made[place][sample] for place, sample, _ in recorded.segments]
        except KeyError as error:
            raise StepError(f"pack {number} of step {record.step} has a segment that is not made any more") from error
        pack = Pack.of(segments, range(len(segments)))
        if (digest := pack.digest()) != recorded.digest:
            raise StepError(
                f"pack {number} of step {record.step} comes out with the digest {digest}, it was {recorded.digest}: its"
                " rollouts are other ones, or their segments are made in another way"
            )
        packs.append(pack)
    return packs


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
    index, rollout = scored.index, scored.rollout
    kept = _Kept(
        index=(*index.group, index.member, index.attempt),
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
        kept = read_msgpack(blob, _Kept)
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

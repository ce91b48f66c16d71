"""What a step was, as one line of `steps.jsonl`: every decision in it that depended on time, and what came of it.

Which groups were whole first, which verdict each got, which rollouts were ended, how segments lie in packs: none of it
can be told from a seed. With the record and the rollouts that it names a step is packed again, digest for digest
(`pack_again`), by another program and years later.

A record is of one rank. A step that was not committed leaves none. Tokens are not in it: they are with the rollouts, as
long as a run keeps those.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Self

import msgspec

from harness.collector.groups import Advantage
from harness.collector.rollout_index import GroupIndex, RolloutIndex, ScoredRollout
from harness.collector.segment_maker import SegmentMaker
from harness.collector.step_outcome import RolloutUse, SettledRollout
from harness.collector.step_result import PackedStep
from harness.errors import StepError
from harness.samples.packs import Pack
from harness.samples.rollout import OutcomeKind
from harness.samples.segments import Segment
from harness.sessions.ledger import Ledger


class RecordedGroup(NamedTuple):
    """A `GroupIndex`."""

    step: int
    number: int


class RecordedRollout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rollout that came to its end in the step, or is carried to the next one."""

    group: RecordedGroup
    member: int
    attempt: int = 0
    use: RolloutUse
    kind: OutcomeKind | None = None
    session_id: str | None = None
    reward: float | None = None
    cause: str = ""
    """Why it is not trained; empty when it is."""
    generated: int = 0
    """Tokens that were sampled in its session."""

    @classmethod
    def of(cls, settled: SettledRollout) -> Self:
        """The record of `settled`."""
        group, member, attempt = settled.index.group, settled.index.member, settled.index.attempt
        return cls(
            group=RecordedGroup(group.step, group.number),
            member=member,
            attempt=attempt,
            use=settled.use,
            kind=settled.kind,
            session_id=settled.session_id,
            reward=settled.reward,
            cause=settled.cause,
            generated=int(settled.ledger["generated"]),
        )

    @property
    def index(self) -> RolloutIndex:
        """Its place in training."""
        return RolloutIndex(GroupIndex(*self.group), self.member, self.attempt)


class RecordedSegment(NamedTuple):
    """A segment of a pack."""

    rollout: int
    """Place of its rollout in `StepRecord.rollouts`."""
    sample: int
    """Place of its sample among those of the rollout."""
    advantage: Advantage


class RecordedPack(msgspec.Struct, frozen=True, kw_only=True):
    """A pack that the learner got."""

    digest: str
    tokens: int
    segments: tuple[RecordedSegment, ...]
    """In order."""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A step that has been collected and packed."""

    step: int
    rollout_seed_base: int
    """Seeds of the rollouts that it began are derived from this one."""
    version: int
    """The policy version that was live when its groups were handed over."""
    groups: tuple[RecordedGroup, ...]
    """Those that make the step, in the order in which they were handed over."""
    rollouts: tuple[RecordedRollout, ...]
    """In the order in which they ended."""
    dropped_groups: Mapping[str, int]
    """How many groups a filter dropped, by reason."""
    ended_groups: tuple[RecordedGroup, ...]
    """Groups that were begun and are no part of the step."""
    carried_groups: tuple[RecordedGroup, ...]
    """Those of them that the next step goes on with."""
    packs: tuple[RecordedPack, ...]
    """In the order in which the learner got them."""
    encoder_counts: Mapping[str, int]
    normalizer: float
    """The losses of all packs were divided by it."""
    ledger: Ledger
    """Of the sessions that came to their end in the step; those that no rollout stands for are `interrupted`."""

    @classmethod
    def of(cls, packed: PackedStep, rollout_seed_base: int, ledger: Ledger) -> Self:
        """The record of a step that was packed, with the ledger of its sessions."""
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
            groups=_record_groups(collected.groups),
            rollouts=tuple(RecordedRollout.of(each) for each in collected.rollouts),
            dropped_groups=dict(collected.dropped),
            ended_groups=_record_groups(collected.ended_groups),
            carried_groups=_record_groups(each.index for each in collected.carried),
            packs=tuple(packs),
            encoder_counts=dict(packed.encoder_counts),
            normalizer=packed.normalizer,
            ledger=ledger,
        )

    @classmethod
    def read(cls, line: bytes | str) -> Self:
        """The record in a line. Raises `StepError` when it is none."""
        try:
            return msgspec.json.decode(line, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StepError(f"expected the record of a step, got something else: {error}") from error

    def to_line(self) -> bytes:
        """JSON, without the end of the line."""
        return msgspec.json.encode(self)


def pack_again(record: StepRecord, rollouts: Iterable[ScoredRollout], maker: SegmentMaker) -> list[Pack]:
    """The packs of a step, in order, made anew out of its rollouts: each equal to the one that was trained.

    `maker` is one like the run's. Raises `StepError` when a rollout is not there, or a pack comes out with another
    digest: the rollouts are other ones then, or their segments are made in another way.
    """
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


def _record_groups(groups: Iterable[GroupIndex]) -> tuple[RecordedGroup, ...]:
    return tuple(RecordedGroup(group.step, group.number) for group in groups)

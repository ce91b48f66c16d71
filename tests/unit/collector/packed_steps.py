"""Steps that were packed, made of scored rollouts with random samples, in the way a pipeline does it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from harness.samples.packs import Pack, PackStream
from harness.samples.rollout import Outcome, OutcomeKind, Rollout
from harness.sessions.ledger import Ledger
from harness.training.collector.groups import GroupIndex, RolloutIndex, ScoredRollout
from harness.training.collector.segment_maker import SegmentedSample, SegmentMaker
from harness.training.collector.step_outcome import (
    CarriedGroup,
    CollectedStep,
    Disposition,
    PackedStep,
    PackFacts,
    SettledRollout,
)
from harness.types import Sample, as_ids, as_logprobs
from tests.builders import sample

FINISHED = Outcome(OutcomeKind.FINISHED, None)


def index_of(step: int, group: int, member: int = 0, attempt: int = 0) -> RolloutIndex:
    """The place of a rollout in training."""
    return RolloutIndex(GroupIndex(step, group), member, attempt)


def session_of(index: RolloutIndex) -> str:
    """The session of the rollout at `index`."""
    return f"{index.group.step:08d}{index.group.number:08d}{index.member:08d}{index.attempt:08d}"


def random_sample(seed: Sequence[int], *, longest: int = 30, version: int = 0) -> Sample:
    """A sample of two prompt tokens and up to `longest` sampled ones, one of them masked."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(2, longest + 1))
    logprobs = as_logprobs(-rng.random(size))
    mask = np.ones(size, np.uint8)
    mask[rng.integers(0, size)] = 0
    return sample(
        tokens=as_ids(rng.integers(0, 500, size + 2)),
        response_length=size,
        loss_mask=mask,
        rollout_log_probs=logprobs,
        weight_versions=(str(version),),
        behavior_versions=as_ids([version] * size),
        proximal_logprobs=logprobs,
        proximal_versions=as_ids([version] * size),
    )


def scored_rollout(index: RolloutIndex, session_id: str | None = None, *, longest: int = 30) -> ScoredRollout:
    """A rollout with one sample, which its place in training determines."""
    seed = [index.group.step, index.group.number, index.member, index.attempt]
    drawn = random_sample(seed, longest=longest, version=index.group.step)
    record = {"turns": [], "ledger": asdict(ledger_of(drawn))}
    rollout = Rollout(session_id or session_of(index), FINISHED, (drawn,), record, {"said": seed}, 1.5)
    return ScoredRollout(index, rollout, reward=float(index.member % 2))


def ledger_of(drawn: Sample) -> Ledger:
    """The ledger of a session that delivered `drawn` and had dropped three tokens more."""
    trained = int(drawn.loss_mask.sum())
    return Ledger(drawn.response_length + 3, trained, drawn.response_length - trained, {"after_incomplete": 3})


def settled(scored: ScoredRollout, use: Disposition = Disposition.DELIVERED) -> SettledRollout:
    """What a collector says of `scored`."""
    rollout = scored.rollout
    return SettledRollout(
        index=scored.index,
        use=use,
        kind=rollout.outcome.kind,
        session_id=rollout.session_id,
        reward=scored.reward,
        cause="" if use is Disposition.DELIVERED else str(use),
        ledger=rollout.session["ledger"],
    )


@dataclass
class Step:
    """A step as its pipeline made it."""

    packed: PackedStep
    rollouts: dict[RolloutIndex, ScoredRollout]
    packs: list[Pack] = field(default_factory=list)


def pack_step(
    step: int,
    maker: SegmentMaker,
    uses: Mapping[RolloutIndex, Disposition],
    *,
    carried: Sequence[CarriedGroup] = (),
    lookahead: int = 2,
    rollouts: Mapping[RolloutIndex, ScoredRollout] | None = None,
) -> Step:
    """Step `step`, in which the rollouts of `uses` ended, in that order; they are `rollouts` where those are given."""
    rollouts = dict(rollouts or {index: scored_rollout(index) for index in uses})
    trained = [index for index, use in uses.items() if use is Disposition.DELIVERED]
    groups = list(dict.fromkeys(index.group for index in trained))
    stream = PackStream(maker.packing_length, lookahead)
    samples: list[SegmentedSample] = []
    in_stream: list[tuple[RolloutIndex, int]] = []
    packs = []
    for index in sorted(trained, key=lambda each: (groups.index(each.group), each.member)):
        for made in maker.make(rollouts[index], advantage=0.25 * index.member - 0.3, version=step):
            samples.append(made.facts)
            if made.segment is not None:
                in_stream.append((index, made.facts.sample))
                packs += [pack] if (pack := stream.add(made.segment)) else []
    packs += stream.finish()
    facts = [
        PackFacts(
            digest=pack.digest(),
            tokens=len(pack),
            trained=int(pack.loss_mask.sum()),
            segments=tuple(in_stream[number] for number in pack.numbers),
        )
        for pack in packs
    ]
    collected = CollectedStep(
        step,
        groups=tuple(groups),
        rollouts=tuple(settled(rollouts[index], use) for index, use in uses.items()),
        dropped={"zero_variance": 1},
        ended_groups=tuple({i.group: 0 for i, use in uses.items() if use is Disposition.OVER_SAMPLED}),
        carried=tuple(carried),
    )
    normalizer = float(sum(each.trained for each in samples))
    return Step(PackedStep(collected, step, tuple(samples), tuple(facts), {}, normalizer), rollouts, packs)


def usual_uses(step: int, groups: int = 3, size: int = 2) -> dict[RolloutIndex, Disposition]:
    """A step of `groups` groups, with a failed attempt, a filtered group and one that was over-sampled."""
    delivered = [index_of(step, group, member) for group in reversed(range(groups)) for member in range(size)]
    delivered[0] = index_of(step, groups - 1, 0, attempt=1)
    return {
        index_of(step, groups - 1, 0): Disposition.REPLACED,
        **dict.fromkeys(delivered, Disposition.DELIVERED),
        **{index_of(step, groups, member): Disposition.FILTERED for member in range(size)},
        **{index_of(step, groups + 1, member): Disposition.OVER_SAMPLED for member in range(size)},
    }

"""Places of a step on one rank: what fills each, and what is left to the next step. Pure.

Groups count from 0: first those left by the step before, then the rank's slice, then spare ones, numbered above the
budget. Every rollout with a session is recorded once, in the step in which it ended.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from harness.samples.rollout import OutcomeKind
from harness.sessions.ledger import Ledger
from harness.training.collector.fates import RolloutFate
from harness.training.collector.rollout_index import GroupIndex, RolloutIndex, ScoredRollout
from harness.training.collector.step_outcome import CarriedGroup, CollectedGroup, RolloutUse, SettledRollout
from harness.training.collector.step_plan import RolloutAttempt
from harness.training.collector.step_rules import StepRules

_USES = {
    RolloutFate.KEPT: RolloutUse.DELIVERED,
    RolloutFate.COUNTED: RolloutUse.COUNTED,
    RolloutFate.REPLACED: RolloutUse.REPLACED,
}


@dataclass(frozen=True, slots=True)
class BegunRollout:
    """A rollout that is due."""

    index: RolloutIndex
    ended: ScoredRollout | None
    """Result from the step before."""
    resumes: str | None
    """Session to continue."""


@dataclass(frozen=True, slots=True)
class EndedRollout:
    """A rollout that no longer runs, and its fate."""

    index: RolloutIndex
    scored: ScoredRollout | None
    """None if cancelled."""
    fate: RolloutFate
    cause: str
    """Why it is not trained."""


@dataclass(slots=True)
class _Place:
    next_attempt: int = 0
    filled: ScoredRollout | None = None
    is_counted: bool = False  # True if `filled` is a counted rollout
    cut_short: ScoredRollout | None = None  # its session is kept, to be continued
    is_begun: bool = False


@dataclass(slots=True)
class _PlacedGroup:
    index: GroupIndex
    places: list[_Place]
    verdict: str | None = None  # None: not judged; "": kept; else the reason for the drop


class StepPlaces:
    """Places of `step`, after the groups `inherited`."""

    def __init__(self, step: int, rules: StepRules, inherited: Sequence[CarriedGroup] = ()) -> None:
        self.unclaimed: list[str] = []
        """Kept sessions that no rollout continues."""
        self.delivered: list[GroupIndex] = []
        self._step = step
        self._rules = rules
        self._slice = rules.budget.slice_of(rules.rank, rules.world_size)
        self._inherited = len(inherited)
        self._keeps = False
        self._groups = [_PlacedGroup(each.index, self._new_places(each)) for each in inherited]
        self._settled: list[tuple[_PlacedGroup, SettledRollout]] = []

    @property
    def wanted(self) -> int:
        """Groups of the step on this rank."""
        return len(self._slice)

    def begin(self, attempt: RolloutAttempt) -> BegunRollout:
        """Return the rollout of `attempt`; a continued one keeps its index."""
        if attempt.group == len(self._groups):
            new = attempt.group - self._inherited
            spare = self._rules.budget.groups + (new - self.wanted) * self._rules.world_size + self._rules.rank
            name = GroupIndex(self._step, self._slice[new] if new < self.wanted else spare)
            self._groups.append(_PlacedGroup(name, self._new_places(CarriedGroup(name))))
        place = self._place(attempt)
        index = RolloutIndex(self._groups[attempt.group].index, attempt.member, place.next_attempt)
        ended, place.filled = place.filled, None
        place.next_attempt, place.is_begun = place.next_attempt + 1, True
        return BegunRollout(index, ended, place.cut_short.rollout.session_id if place.cut_short else None)

    def settle(self, attempt: RolloutAttempt, ended: EndedRollout) -> None:
        """Record a rollout that ended."""
        if ended.fate is not RolloutFate.REPLACED:
            place = self._place(attempt)
            place.filled, place.is_counted = ended.scored, ended.fate is RolloutFate.COUNTED
        self._record(attempt, ended, _USES[ended.fate])

    def leave(self, attempt: RolloutAttempt, ended: EndedRollout) -> None:
        """Record a rollout that ended with the step, for the next one if its session was kept."""
        kept = ended.scored if ended.scored is not None and ended.scored.has_kept_session else None
        self._record(attempt, ended, RolloutUse.OVER_SAMPLED if kept is None else RolloutUse.CARRIED)
        if kept is not None:
            place = self._place(attempt)
            place.next_attempt = ended.index.attempt
            place.cut_short = replace(kept, rollout=replace(kept.rollout, samples=()))

    def rewards(self, group: int) -> list[float]:
        """Return the rewards of a group, without counted rollouts."""
        return [
            place.filled.reward
            for place in self._groups[group].places
            if place.filled is not None and place.filled.reward is not None and not place.is_counted
        ]

    def drop(self, group: int, reason: str) -> None:
        """Record a filtered group."""
        self._groups[group].verdict = reason
        self._groups[group].places = []

    def deliver(self, group: int) -> CollectedGroup:
        """Hand over a whole group."""
        delivered = self._groups[group]
        delivered.verdict = ""
        kept = tuple(place.filled for place in delivered.places if place.filled is not None and not place.is_counted)
        counted = sum(place.is_counted for place in delivered.places)
        delivered.places = []
        self.delivered.append(delivered.index)
        return CollectedGroup(delivered.index, kept, counted)

    def close(self, *, keeps: bool) -> tuple[CarriedGroup, ...]:
        """Return the groups for the next step, if it `keeps` any."""
        self._keeps = keeps
        if keeps:
            return tuple(_carry(group) for group in self._groups if group.verdict is None and _holds_rollouts(group))
        # Rollouts from the step before that never began end here.
        for number, group in enumerate(self._groups):
            for member, place in enumerate(group.places):
                scored = place.filled or place.cut_short
                if scored is not None and not place.is_begun:
                    ended = EndedRollout(scored.index, place.filled, RolloutFate.REPLACED, "the step was over")
                    self._record(RolloutAttempt(number, member, 0), ended, RolloutUse.OVER_SAMPLED)
        return ()

    def settled(self) -> Iterator[SettledRollout]:
        """Yield recorded rollouts with their final use."""
        for group, rollout in self._settled:
            use = rollout.use
            if use in (RolloutUse.DELIVERED, RolloutUse.COUNTED) and group.verdict != "":
                left = RolloutUse.CARRIED if self._keeps else RolloutUse.OVER_SAMPLED
                use = left if group.verdict is None else RolloutUse.FILTERED
            yield replace(rollout, use=use)

    def over_sampled(self) -> Iterator[GroupIndex]:
        """Yield groups that are neither in the step nor filtered."""
        for group in self._groups:
            if group.verdict is None and any(place.is_begun for place in group.places):
                yield group.index

    def _place(self, attempt: RolloutAttempt) -> _Place:
        return self._groups[attempt.group].places[attempt.member]

    def _new_places(self, carried: CarriedGroup) -> list[_Place]:
        return [
            _Place(carried.attempts.get(member, 0), carried.ended.get(member), cut_short=carried.cut_short.get(member))
            for member in range(self._rules.budget.group_size)
        ]

    # A continued rollout has a new session, which first takes over the tokens of the kept one.
    #
    #     how it ended                        recorded with           the kept session
    #     with a session of its own           its own session         was taken over
    #     never begun, or refused one         the kept session        is given back
    #     without one in any other way        no session              is given back, if it is there
    def _record(self, attempt: RolloutAttempt, ended: EndedRollout, use: RolloutUse) -> None:
        place, scored = self._place(attempt), ended.scored
        kept, place.cut_short = place.cut_short, None
        if kept is not None and (scored is None or scored.rollout.session_id is None):
            self.unclaimed.append(str(kept.rollout.session_id))
            # Otherwise (cancelled, drained, no answer) the server may or may not have taken the session over. Either
            # way one session belongs to no step, and the database of the run books it as `interrupted`.
            was_refused = scored is not None and scored.rollout.outcome.kind is OutcomeKind.NOT_STARTED
            scored = kept if was_refused or not place.is_begun else scored
        rollout = None if scored is None else scored.rollout
        settled = SettledRollout(
            index=ended.index,
            use=use,
            kind=None if rollout is None else rollout.outcome.kind,
            session_id=None if rollout is None else rollout.session_id,
            reward=None if scored is None else scored.reward,
            cause=ended.cause,
            ledger=Ledger().to_json() if rollout is None else rollout.session.get("ledger", Ledger().to_json()),
            seconds=0.0 if rollout is None else rollout.seconds,
        )
        self._settled.append((self._groups[attempt.group], settled))


def _holds_rollouts(group: _PlacedGroup) -> bool:
    return any(place.filled or place.cut_short for place in group.places)


def _carry(group: _PlacedGroup) -> CarriedGroup:
    return CarriedGroup(
        group.index,
        ended={member: place.filled for member, place in enumerate(group.places) if place.filled is not None},
        cut_short={member: place.cut_short for member, place in enumerate(group.places) if place.cut_short is not None},
        attempts={
            member: place.filled.index.attempt if place.filled is not None else place.next_attempt
            for member, place in enumerate(group.places)
        },
    )

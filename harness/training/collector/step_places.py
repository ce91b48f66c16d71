"""Places of a step on one rank: what begins next, what fills each place, and what is left to the next step. Pure.

The first whole groups that pass the filter make the step. Dropped groups and failed rollouts are replaced within
limits: a step fails with its causes and never hangs. Equal calls give equal steps, without clocks and tasks.

Groups count from 0: first those left by the step before, then the rank's slice, then spare ones, numbered above the
budget. Every rollout with a session is recorded once, in the step in which it ended.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from harness.errors import StepError
from harness.samples.rollout import OutcomeKind
from harness.sessions.ledger import Ledger
from harness.training.collector.groups import GroupIndex, RolloutIndex, ScoredRollout
from harness.training.collector.step_outcome import CarriedGroup, CollectedGroup, Disposition, SettledRollout
from harness.training.collector.step_rules import Order, StepRules, dispose


@dataclass(frozen=True, slots=True)
class DueRollout:
    index: RolloutIndex
    resumes: str | None
    """Session to continue."""


@dataclass(frozen=True, slots=True)
class EndedRollout:
    index: RolloutIndex
    scored: ScoredRollout | None
    """None if cancelled or left behind."""
    problem: str = ""
    """Why it is unusable, beyond its outcome."""


@dataclass(slots=True)
class _Place:
    next_attempt: int = 0
    filled: ScoredRollout | None = None
    cut_short: ScoredRollout | None = None  # its session is kept, to be continued
    is_counted: bool = False  # True if `filled` is a counted rollout
    tries: int = 0  # attempts that this step began


@dataclass(slots=True)
class _Group:
    index: GroupIndex
    number: int
    places: list[_Place]
    waiting: list[int]  # members to begin
    verdict: str | None = None  # None: not judged; "": kept; else the reason for the drop

    @property
    def delivered(self) -> list[ScoredRollout]:
        return [place.filled for place in self.places if place.filled is not None and not place.is_counted]


class StepPlaces:
    """Places of `step`, after the groups `inherited`."""

    def __init__(self, step: int, rules: StepRules, inherited: Sequence[CarriedGroup] = ()) -> None:
        self.dropped: Counter[str] = Counter()
        """Filtered groups by reason."""
        self.unclaimed: list[str] = []
        """Kept sessions that no rollout continues."""
        self._step = step
        self._rules = rules
        self._slice = rules.budget.slice_of(rules.rank, rules.world_size)
        self._inherited = len(inherited)
        self._groups: dict[GroupIndex, _Group] = {}
        for each in inherited:
            self._add_group(each)
        self._kept: list[_Group] = []  # in the order of their verdicts
        self._handed_over: list[_Group] = []
        self._causes: Counter[str] = Counter()  # of replaced rollouts
        self._settled: list[SettledRollout] = []
        self._keeps = False

    @property
    def is_complete(self) -> bool:
        """True once every group of the rank's slice is kept."""
        return len(self._kept) == len(self._slice)

    @property
    def delivered(self) -> tuple[GroupIndex, ...]:
        return tuple(group.index for group in self._handed_over)

    def begin(self) -> DueRollout | None:
        """Return the next rollout, of the lowest group, or None. A continued one keeps its index.

        Settles results of the step before on the way, and raises like `settle`.
        """
        while not self.is_complete and (group := self._find_waiting()) is not None:
            member = group.waiting.pop(0)
            place = group.places[member]
            index = RolloutIndex(group.index, member, place.next_attempt)
            ended, place.filled = place.filled, None
            place.next_attempt, place.tries = place.next_attempt + 1, place.tries + 1
            if ended is None:
                return DueRollout(index, place.cut_short.rollout.session_id if place.cut_short else None)
            self.settle(EndedRollout(index, ended))
        return None

    def settle(self, ended: EndedRollout) -> None:
        """Settle a rollout that ended, and judge its group once that is whole.

        Raises `StepError` with all causes if a place has no attempts left, or too many groups were dropped.
        """
        disposition, cause = self._dispose(ended)
        self._fill(ended, disposition, cause)
        if self.is_complete:
            return
        group, member = self._groups[ended.index.group], ended.index.member
        if disposition is Disposition.REPLACED:
            self._causes[cause] += 1
            if group.places[member].tries >= self._rules.attempts:
                causes = "; ".join(f"{cause} x{count}" for cause, count in self._causes.most_common(5))
                raise StepError(
                    f"place {member} of group {group.number} has used up its {self._rules.attempts} attempts;"
                    f" rollouts of this step were replaced because of: {causes}"
                )
            group.waiting.append(member)
        elif not group.waiting and all(place.filled is not None for place in group.places):
            self._judge(group)

    def leave(self, ended: EndedRollout) -> None:
        """Settle a rollout that ended with the step, and leave it to the next one if its session was kept."""
        disposition, cause = self._dispose(ended)
        if ended.scored is not None and ended.scored.has_kept_session:
            self._record(ended.index, ended.scored, Disposition.CARRIED, cause)
            place = self._place(ended.index)
            place.next_attempt = ended.index.attempt
            place.cut_short = replace(ended.scored, rollout=replace(ended.scored.rollout, samples=()))
        elif disposition is Disposition.REPLACED:
            self._record(ended.index, ended.scored, Disposition.OVER_SAMPLED, cause)
        else:
            self._fill(ended, disposition, cause)

    def hand_over(self) -> list[CollectedGroup]:
        """Return kept groups that are now due, once."""
        due = self._kept
        if self._rules.order is Order.INDEX:
            undecided = (group.number for group in self._groups.values() if group.verdict is None)
            first = len(self._groups) if self.is_complete else next(undecided, len(self._groups))
            due = sorted((group for group in due if group.number < first), key=lambda group: group.number)
        new = due[len(self._handed_over) :]
        self._handed_over += new
        groups = []
        for group in new:
            counted = sum(place.is_counted for place in group.places)
            groups.append(CollectedGroup(group.index, tuple(group.delivered), counted))
            group.places = []
        return groups

    def close(self, *, keeps: bool) -> tuple[CarriedGroup, ...]:
        """Return the groups for the next step, if it `keeps` any."""
        self._keeps = keeps
        if keeps:
            undecided = (group for group in self._groups.values() if group.verdict is None)
            return tuple(_carry(each) for each in undecided if any(p.filled or p.cut_short for p in each.places))
        # Rollouts from the step before that never began end here.
        for group in self._groups.values():
            for place in group.places:
                scored = place.filled or place.cut_short
                if scored is not None and not place.tries:
                    self._record(scored.index, place.filled, Disposition.OVER_SAMPLED, "the step was over")
        return ()

    def settled(self) -> Iterator[SettledRollout]:
        """Yield recorded rollouts with their final use."""
        for rollout in self._settled:
            use, verdict = rollout.use, self._groups[rollout.index.group].verdict
            if use in (Disposition.DELIVERED, Disposition.COUNTED) and verdict != "":
                left = Disposition.CARRIED if self._keeps else Disposition.OVER_SAMPLED
                use = left if verdict is None else Disposition.FILTERED
            yield replace(rollout, use=use)

    def over_sampled(self) -> Iterator[GroupIndex]:
        """Yield groups that are neither in the step nor filtered."""
        for group in self._groups.values():
            if group.verdict is None and any(place.tries for place in group.places):
                yield group.index

    def _find_waiting(self) -> _Group | None:
        most = len(self._slice) + self._rules.over_sampling + self.dropped.total()
        waiting = (group for group in islice(self._groups.values(), most) if group.waiting)
        if (group := next(waiting, None)) is not None or len(self._groups) >= most:
            return group
        new, wanted = len(self._groups) - self._inherited, len(self._slice)
        spare = self._rules.budget.groups + (new - wanted) * self._rules.world_size + self._rules.rank
        return self._add_group(CarriedGroup(GroupIndex(self._step, self._slice[new] if new < wanted else spare)))

    def _add_group(self, carried: CarriedGroup) -> _Group:
        members = range(self._rules.budget.group_size)
        places = [
            _Place(carried.attempts.get(member, 0), carried.ended.get(member), carried.cut_short.get(member))
            for member in members
        ]
        group = self._groups[carried.index] = _Group(carried.index, len(self._groups), places, list(members))
        return group

    def _place(self, index: RolloutIndex) -> _Place:
        return self._groups[index.group].places[index.member]

    def _dispose(self, ended: EndedRollout) -> tuple[Disposition, str]:
        if ended.scored is None:
            return Disposition.REPLACED, ended.problem
        outcome = ended.scored.rollout.outcome
        disposition = dispose(outcome.kind, self._rules.on_failure, is_usable=not ended.problem)
        is_trained = disposition is Disposition.DELIVERED
        return disposition, "" if is_trained else f"{outcome.kind}: {ended.problem or outcome.detail}"

    def _fill(self, ended: EndedRollout, disposition: Disposition, cause: str) -> None:
        if disposition is not Disposition.REPLACED:
            place = self._place(ended.index)
            place.filled, place.is_counted = ended.scored, disposition is Disposition.COUNTED
            place.next_attempt = ended.index.attempt  # a next step that inherits the place begins with this end
        self._record(ended.index, ended.scored, disposition, cause)

    def _judge(self, group: _Group) -> None:
        rewards = [scored.reward for scored in group.delivered if scored.reward is not None]
        group_filter = self._rules.group_filter
        group.verdict = (None if group_filter is None else group_filter(rewards)) or ""
        if not group.verdict:
            self._kept.append(group)
            return
        group.places = []
        self.dropped[group.verdict] += 1
        if self.dropped.total() > self._rules.most_dropped:
            reasons = ", ".join(f"{word} x{count}" for word, count in sorted(self.dropped.items()))
            raise StepError(f"more than {self._rules.most_dropped} groups of a step were dropped: {reasons}")

    # A continued rollout has a new session, which first takes over the tokens of the kept one.
    #
    #     how it ended                        recorded with           the kept session
    #     with a session of its own           its own session         was taken over
    #     never begun, or refused one         the kept session        is given back
    #     without one in any other way        no session              is given back, if it is there
    def _record(self, index: RolloutIndex, scored: ScoredRollout | None, use: Disposition, cause: str) -> None:
        place = self._place(index)
        kept, place.cut_short = place.cut_short, None
        if kept is not None and (scored is None or scored.rollout.session_id is None):
            self.unclaimed.append(str(kept.rollout.session_id))
            # Otherwise (cancelled, drained, no answer) the server may or may not have taken the session over. Either
            # way one session belongs to no step, and the database of the run books it as `interrupted`.
            was_refused = scored is not None and scored.rollout.outcome.kind is OutcomeKind.NOT_STARTED
            scored = kept if was_refused or not place.tries else scored
        rollout = None if scored is None else scored.rollout
        settled = SettledRollout(
            index=index,
            use=use,
            kind=None if rollout is None else rollout.outcome.kind,
            session_id=None if rollout is None else rollout.session_id,
            reward=None if scored is None else scored.reward,
            cause=cause,
            ledger=Ledger().to_json() if rollout is None else rollout.session.get("ledger", Ledger().to_json()),
        )
        self._settled.append(settled)


def _carry(group: _Group) -> CarriedGroup:
    places = dict(enumerate(group.places))
    return CarriedGroup(
        group.index,
        ended={member: place.filled for member, place in places.items() if place.filled is not None},
        cut_short={member: place.cut_short for member, place in places.items() if place.cut_short is not None},
        attempts={member: place.next_attempt for member, place in places.items()},
    )

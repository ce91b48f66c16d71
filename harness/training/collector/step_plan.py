"""Plan of one step on one rank: the next rollout, the effect of a failure, and completion.

The first whole groups that pass the filter make the step. Dropped groups and failed rollouts are replaced within
limits: a step fails with its causes and never hangs. Equal calls give equal steps, without clocks and tasks.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from harness.errors import StepError
from harness.training.collector.fates import RolloutFate


class Order(StrEnum):
    """Order in which groups are handed over."""

    INDEX = "index"
    """By number, once all before are decided."""
    ARRIVAL = "arrival"
    """As they are kept."""


@dataclass(frozen=True, slots=True, order=True)
class RolloutAttempt:
    """Try `number` to fill place `member`."""

    group: int
    member: int
    number: int


@dataclass(slots=True)
class _Group:
    waiting: list[RolloutAttempt]  # attempts not begun
    open_places: int  # neither kept nor counted
    verdict: str | None = None  # None: not judged; "": kept; else the reason for the drop


@dataclass(slots=True)
class StepPlan:
    """Step of `wanted` groups, with `over_sampling` more begun."""

    wanted: int
    group_size: int = 1
    over_sampling: int = 0
    attempts: int = 3
    """Per place."""
    most_dropped: int = 0
    """Groups that may be replaced."""
    order: Order = Order.INDEX
    dropped: Counter[str] = field(default_factory=Counter, init=False)
    """Groups by reason."""
    fates: Counter[RolloutFate] = field(default_factory=Counter, init=False)
    running: set[RolloutAttempt] = field(default_factory=set, init=False)
    _groups: list[_Group] = field(default_factory=list, init=False)
    _kept: list[int] = field(default_factory=list, init=False)  # in the order of their verdicts
    _handed_over: int = field(default=0, init=False)
    _causes: list[str] = field(default_factory=list, init=False)  # of replaced rollouts

    def __post_init__(self) -> None:
        if self.wanted < 0 or min(self.group_size, self.attempts) < 1 or min(self.over_sampling, self.most_dropped) < 0:
            raise StepError(
                "expected wanted, over_sampling and most_dropped of at least 0, group_size and attempts of at least 1;"
                f" got {self.wanted}, {self.over_sampling}, {self.most_dropped}, {self.group_size}, {self.attempts}"
            )

    @property
    def is_complete(self) -> bool:
        """True once every wanted group is kept."""
        return len(self._kept) == self.wanted

    @property
    def over_sampled(self) -> list[int]:
        """Groups begun but neither kept nor dropped."""
        return [number for number, group in enumerate(self._groups) if self.is_complete and group.verdict is None]

    def begin(self) -> RolloutAttempt | None:
        """Return the next rollout, of the lowest group, or None."""
        if self.is_complete:
            return None
        group = next((each for each in self._groups if each.waiting), None)
        if group is None:
            if len(self._groups) >= self.wanted + self.over_sampling + self.dropped.total():
                return None
            number = len(self._groups)
            group = _Group([RolloutAttempt(number, member, 0) for member in range(self.group_size)], self.group_size)
            self._groups.append(group)
        attempt = group.waiting.pop(0)
        self.running.add(attempt)
        return attempt

    def settle(self, attempt: RolloutAttempt, fate: RolloutFate, cause: str = "") -> bool:
        """Settle `attempt`. Return True if its group is now whole.

        Raises `StepError` if it does not run, or with all causes if a place has no attempts left.
        """
        if attempt not in self.running:
            raise StepError(f"{attempt} does not run: it has not begun, or is settled")
        self.running.remove(attempt)
        self.fates[fate] += 1
        if self.is_complete:
            return False
        group = self._groups[attempt.group]
        if fate is not RolloutFate.REPLACED:
            group.open_places -= 1
            return not group.open_places
        self._causes.append(cause)
        if attempt.number + 1 >= self.attempts:
            raise StepError(
                f"place {attempt.member} of group {attempt.group} has used up its {self.attempts} attempts;"
                f" rollouts of this step were replaced because of: {_list_causes(self._causes)}"
            )
        group.waiting.append(RolloutAttempt(attempt.group, attempt.member, attempt.number + 1))
        return False

    def judge(self, group: int, reason: str | None = None) -> None:
        """Keep a whole group, or drop it for `reason`. Raises `StepError`, also for one drop too many."""
        if group >= len(self._groups) or self._groups[group].open_places or self._groups[group].verdict is not None:
            raise StepError(f"group {group} cannot be judged: it is not whole, or was judged before")
        if self.is_complete:
            return
        self._groups[group].verdict = reason or ""
        if not reason:
            self._kept.append(group)
            return
        self.dropped[reason] += 1
        if self.dropped.total() > self.most_dropped:
            reasons = ", ".join(f"{word} x{count}" for word, count in sorted(self.dropped.items()))
            raise StepError(f"more than {self.most_dropped} groups of a step were dropped: {reasons}")

    def hand_over(self) -> list[int]:
        """Return kept groups that are now due, once."""
        if self.order is Order.ARRIVAL:
            due = self._kept
        elif self.is_complete:
            due = sorted(self._kept)
        else:
            undecided = (number for number, group in enumerate(self._groups) if group.verdict is None)
            first = next(undecided, len(self._groups))
            due = sorted(number for number in self._kept if number < first)
        new = due[self._handed_over :]
        self._handed_over = len(due)
        return new


def _list_causes(causes: Iterable[str]) -> str:
    return "; ".join(f"{cause} x{count}" for cause, count in Counter(causes).most_common(5))

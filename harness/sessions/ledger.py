"""Ledger of sampled tokens (I4): generated + inherited = trained + masked + dropped(reason).

Engines report the left side, samples give the right one; a difference is a bug and fails the run. `unknown`, on neither
side, bounds the tokens that engines may have sampled and never returned, for comparison with their counter.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Self

from harness.errors import LedgerImbalance
from harness.samples.delivery import DeliveryPlan
from harness.turn_ends import TurnStatus
from harness.types import Turn, UnknownOutput


class DropReason(StrEnum):
    """Reason why sampled tokens are in no sample."""

    AFTER_INCOMPLETE = "after_incomplete"
    """After a turn that is not COMPLETED (I3)."""
    OTHER_SAMPLE = "other_sample"
    MAIN = "main"
    """Untrained role, like the seven below (`samples.roles`)."""
    RESAMPLE = "resample"
    COMPACTION = "compaction"
    REJECTED = "rejected"
    SUBAGENT = "subagent"
    SIDE = "side"
    STRAY = "stray"
    SUPERSEDED = "superseded"
    FAILED_TURN = "failed_turn"
    UNDELIVERED = "undelivered"
    """Client left and has not returned."""
    AFTER_STOP = "after_stop"
    """Stop string began in an earlier request."""
    RESTARTED = "restarted"
    UNVERSIONED = "unversioned"
    """Received before the engine reported weights."""
    INVALID_REPLY = "invalid_reply"
    MISSING_ROWS = "missing_rows"
    """Behind a missing row that is required."""
    LEFT_BEHIND = "left_behind"
    """Turn that a successor session cannot continue."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """Tokens that may have been sampled and not returned."""

    requests: int = 0
    tokens: int = 0
    """Upper bound."""

    @classmethod
    def of(cls, outputs: Iterable[UnknownOutput]) -> Self:
        counted = list(outputs)
        return cls(len(counted), sum(each.at_most for each in counted))

    def __add__(self, other: "Unknown") -> "Unknown":
        return Unknown(self.requests + other.requests, self.tokens + other.tokens)

    def __sub__(self, other: "Unknown") -> "Unknown":
        return Unknown(self.requests - other.requests, self.tokens - other.tokens)

    def to_json(self) -> dict[str, int]:
        return {"requests": self.requests, "tokens": self.tokens}


NOTHING_UNKNOWN = Unknown()


@dataclass(frozen=True, slots=True)
class Ledger:
    """Token counts; `masked` ones are delivered but not trained."""

    generated: int = 0
    trained: int = 0
    masked: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    unknown: Unknown = NOTHING_UNKNOWN
    inherited: int = 0
    """Generated for an earlier session (`sessions.inheritance`)."""

    @property
    def difference(self) -> int:
        return self.generated + self.inherited - self.trained - self.masked - sum(self.dropped.values())

    @property
    def sources(self) -> str:
        """Left side of the sum, in words."""
        inherited = f" + {self.inherited:,} inherited" if self.inherited else ""
        return f"{self.generated:,} generated{inherited}"

    def check(self, of: str) -> None:
        """Raise `LedgerImbalance`, naming `of`, unless balanced."""
        if self.difference:
            raise LedgerImbalance(
                f"{of}: {self.generated + self.inherited} tokens generated, but {self.trained} trained"
                f" + {self.masked} masked"
                f" + {sum(self.dropped.values())} dropped leaves {self.difference} unaccounted for"
            )

    def to_json(self) -> dict[str, object]:
        return {
            "generated": self.generated,
            "trained": self.trained,
            "masked": self.masked,
            "dropped": dict(self.dropped),
            "unknown": self.unknown.to_json(),
            **({"inherited": self.inherited} if self.inherited else {}),
        }


class NewOutput(NamedTuple):
    """Output that a turn's last attempt added."""

    sampled: int
    unknown: Unknown


def find_dispositions(turns: Sequence[Turn], plan: DeliveryPlan) -> dict[int, DropReason | None]:
    """Return drop reasons by turn index; None for sampled turns."""
    kept = {turn.index for branch in plan.delivered for turn in branch.kept}
    ends: set[int | None] = set()
    without_rows: set[int | None] = set()
    found: dict[int, DropReason | None] = {}
    for turn in turns:
        is_behind = turn.parent in ends
        if is_behind or (turn.is_usable and turn.status is not TurnStatus.COMPLETED):
            ends.add(turn.index)
        if plan.lacks_rows(turn) or turn.parent in without_rows:
            without_rows.add(turn.index)
        if turn.index in kept:
            found[turn.index] = None
        elif turn.status is TurnStatus.FAILED:
            found[turn.index] = DropReason.FAILED_TURN
        elif turn.is_suspended:
            found[turn.index] = DropReason.UNDELIVERED
        elif not plan.is_trained(turn):
            found[turn.index] = DropReason(plan.roles[turn.index].role)
        elif turn.index in without_rows:
            found[turn.index] = DropReason.MISSING_ROWS
        else:
            found[turn.index] = DropReason.AFTER_INCOMPLETE if is_behind else DropReason.OTHER_SAMPLE
    return found


def account(
    turns: Sequence[Turn],
    generated: int,
    plan: DeliveryPlan,
    left_behind: int = 0,
    unknown_left_behind: Unknown = NOTHING_UNKNOWN,
) -> Ledger:
    dispositions = find_dispositions(turns, plan)
    kept = {turn.index: turn for branch in plan.delivered for turn in branch.kept}
    trained = masked = inherited = 0
    # `left_behind` belongs to turns that this session did not take over.
    dropped: Counter[str] = Counter({DropReason.LEFT_BEHIND: left_behind} if left_behind else {})
    for turn in turns:
        reason = dispositions[turn.index]
        if reason is None:
            part = kept[turn.index]
            own = part.masked_from if plan.is_trained(turn) else 0
            masked += part.output_ids.size - own
            trained += own
            if cut := turn.output_ids.size - part.output_ids.size:
                dropped[DropReason.MISSING_ROWS] += cut
        elif turn.output_ids.size:
            dropped[reason] += turn.output_ids.size
        for each in turn.discarded:
            dropped[each.reason] += each.tokens
        inherited += turn.sampled_tokens if turn.notes.inherited else 0
    unheard = (each for turn in turns if not turn.notes.inherited for each in turn.unknown)
    unknown = unknown_left_behind + Unknown.of(unheard)
    return Ledger(generated, trained, masked, dict(dropped), unknown, inherited)


def total(ledgers: Iterable[Ledger]) -> Ledger:
    generated = trained = masked = inherited = 0
    dropped: Counter[str] = Counter()
    unknown = NOTHING_UNKNOWN
    for ledger in ledgers:
        generated += ledger.generated
        trained += ledger.trained
        masked += ledger.masked
        dropped.update(ledger.dropped)
        unknown += ledger.unknown
        inherited += ledger.inherited
    return Ledger(generated, trained, masked, dict(dropped), unknown, inherited)

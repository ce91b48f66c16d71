"""Where every sampled token went (I4): generated = trained + masked + dropped(reason).

The two sides are counted apart: `generated` grows when an engine reports tokens, the other side is what the samples of
this moment would deliver. A difference is a bug and fails the run.

An engine may sample and not hand over: the connection breaks, its process dies, its reply is not to be believed, or
nobody waits for it any more. Those tokens are on neither side. They are `unknown`, as requests and as the most that
they can have come to, so that the sum and the engine's own counter can be held against each other.
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
    """Why sampled tokens are in no sample."""

    AFTER_INCOMPLETE = "after_incomplete"
    """Turns after the first one of their branch that is not COMPLETED (I3)."""
    OTHER_SAMPLE = "other_sample"
    """Turns of a sample that its consumer did not take."""
    MAIN = "main"
    """Turns of this role, which the session does not train; the same for the six roles below (`samples.roles`)."""
    RESAMPLE = "resample"
    COMPACTION = "compaction"
    REJECTED = "rejected"
    SUBAGENT = "subagent"
    SIDE = "side"
    STRAY = "stray"
    FAILED_TURN = "failed_turn"
    """Partial output of a turn that FAILED."""
    UNDELIVERED = "undelivered"
    """Partial output of a turn whose client left, and has not come back for it."""
    AFTER_STOP = "after_stop"
    """Sampled by an engine behind a stop string that began in the request before."""
    RESTARTED = "restarted"
    """Partial output that no request can go on from: an engine follows a grammar from the first token on only."""
    UNVERSIONED = "unversioned"
    """Arrived of a request that broke, and the engine had not said which weights sampled it."""
    INVALID_REPLY = "invalid_reply"
    """Arrived of a request whose reply contradicts itself: nothing of it is used."""
    LEFT_BEHIND = "left_behind"
    """Turns of the session that was taken over, which its successor cannot go on from."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """Tokens that engines may have sampled and have not handed over."""

    requests: int = 0
    """Those whose end was never heard."""
    tokens: int = 0
    """The most that they can have sampled beyond what arrived."""

    @classmethod
    def of(cls, outputs: Iterable[UnknownOutput]) -> Self:
        """The sum of `outputs`."""
        counted = list(outputs)
        return cls(len(counted), sum(each.at_most for each in counted))

    def __add__(self, other: "Unknown") -> "Unknown":
        return Unknown(self.requests + other.requests, self.tokens + other.tokens)

    def __sub__(self, other: "Unknown") -> "Unknown":
        return Unknown(self.requests - other.requests, self.tokens - other.tokens)

    def to_json(self) -> dict[str, int]:
        """The form served over HTTP and written to run directories."""
        return {"requests": self.requests, "tokens": self.tokens}


NOTHING_UNKNOWN = Unknown()


@dataclass(frozen=True, slots=True)
class Ledger:
    """Token counts; `masked` are sampled tokens that are delivered but not trained."""

    generated: int = 0
    trained: int = 0
    masked: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    unknown: Unknown = NOTHING_UNKNOWN
    """Beside the sum: it is no part of `generated`."""

    @property
    def difference(self) -> int:
        """The tokens that are missing on the right side; 0 in a ledger that is right."""
        return self.generated - self.trained - self.masked - sum(self.dropped.values())

    def check(self, of: str) -> None:
        """Raises `LedgerImbalance` naming `of` unless the ledger balances."""
        if self.difference:
            raise LedgerImbalance(
                f"{of}: {self.generated} tokens generated, but {self.trained} trained + {self.masked} masked"
                f" + {sum(self.dropped.values())} dropped leaves {self.difference} unaccounted for"
            )

    def to_json(self) -> dict[str, object]:
        """The form served over HTTP and written to run directories."""
        return {
            "generated": self.generated,
            "trained": self.trained,
            "masked": self.masked,
            "dropped": dict(self.dropped),
            "unknown": self.unknown.to_json(),
        }


class NewOutput(NamedTuple):
    """The part of a turn's output that its last attempt brought."""

    sampled: int
    unknown: Unknown


def find_dispositions(turns: Sequence[Turn], plan: DeliveryPlan) -> dict[int, DropReason | None]:
    """Find, by the index of a turn, why its output is in no sample; None for one that is in a sample."""
    kept = {turn.index for branch in plan.delivered for turn in branch.kept}
    ends: set[int | None] = set()
    found: dict[int, DropReason | None] = {}
    for turn in turns:
        is_behind = turn.parent in ends
        if is_behind or (turn.is_usable and turn.status is not TurnStatus.COMPLETED):
            ends.add(turn.index)
        if turn.index in kept:
            found[turn.index] = None
        elif turn.status is TurnStatus.FAILED:
            found[turn.index] = DropReason.FAILED_TURN
        elif turn.is_suspended:
            found[turn.index] = DropReason.UNDELIVERED
        elif not plan.is_trained(turn):
            found[turn.index] = DropReason(plan.roles[turn.index].role)
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
    """The ledger of one session, were its samples collected now; what was left behind is of no turn that it has."""
    dispositions = find_dispositions(turns, plan)
    trained = masked = 0
    dropped: Counter[str] = Counter({DropReason.LEFT_BEHIND: left_behind} if left_behind else {})
    for turn in turns:
        reason = dispositions[turn.index]
        if reason is None:
            own = turn.masked_from if plan.is_trained(turn) else 0
            masked += turn.output_ids.size - own
            trained += own
        elif turn.output_ids.size:
            dropped[reason] += turn.output_ids.size
        for each in turn.discarded:
            dropped[each.reason] += each.tokens
    unknown = unknown_left_behind + Unknown.of(each for turn in turns for each in turn.unknown)
    return Ledger(generated, trained, masked, dict(dropped), unknown)


def total(ledgers: Iterable[Ledger]) -> Ledger:
    """The ledger of a run from those of its sessions."""
    generated = trained = masked = 0
    dropped: Counter[str] = Counter()
    unknown = NOTHING_UNKNOWN
    for ledger in ledgers:
        generated += ledger.generated
        trained += ledger.trained
        masked += ledger.masked
        dropped.update(ledger.dropped)
        unknown += ledger.unknown
    return Ledger(generated, trained, masked, dict(dropped), unknown)

"""A trainer's wishes for the sessions, when all it says is SGLang's control verbs: a table and a few states, no I/O.

Such a trainer knows engines and no sessions. Between the verbs that it sends, sessions must neither ask for tokens in
vain nor lose turns, so the verbs stand for a hold on the gate: shut before the first worker is told, open after the
last one was.

    verb                                     gate before    gate after
    /pause_generation                        shut, swept    shut until /continue_generation
    /update_weight_version, and
    /update_weights_* with a weight_version  shut, swept    open, unless workers were paused
    /update_weights_* without one            shut, swept    shut for a while: more parts and the label may follow
    /abort_request with abort_all            shut           shut for a while: see below
    /continue_generation                     as it was      open
    any other                                as it was      as it was

An `abort_all` does not say why. One that is followed by a pause or by new weights within the time allowed began an
update: its turns go on afterwards. One that nothing follows ended a rollout: its sessions end. `/continue_generation`
says that it was neither, and a drain of the gate that it was the end.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from harness.errors import MalformedRequest
from server_patch.router.verbs import Order, VerbError


class Intent(StrEnum):
    """The subject of a verb, as far as sessions are concerned."""

    PAUSE = "pause"
    CONTINUE = "continue"
    NEW_WEIGHTS = "new_weights"
    """Weights are complete, and have their label."""
    PART_OF_WEIGHTS = "part_of_weights"
    """Weights that have no label yet, and may not be complete."""
    ABORT_ALL = "abort_all"


class Then(StrEnum):
    """The fate of a gate that nobody said anything of for the time allowed."""

    OPEN = "open"
    END = "end"
    """Every session ends, then it opens."""


class Begun(StrEnum):
    """The work that a trainer has begun and not ended yet, as its hold keeps it for a router that is started again."""

    PAUSE = "pause"
    WEIGHTS = "weights"
    ABORT = "abort"


_BY_VERB: Mapping[str, Intent] = MappingProxyType(
    {
        "/pause_generation": Intent.PAUSE,
        "/continue_generation": Intent.CONTINUE,
        "/update_weight_version": Intent.NEW_WEIGHTS,
        "/update_weights_from_disk": Intent.PART_OF_WEIGHTS,
        "/update_weights_from_distributed": Intent.PART_OF_WEIGHTS,
        "/update_weights_from_tensor": Intent.PART_OF_WEIGHTS,
    }
)


def intent_of(order: Order) -> Intent | None:
    """The intent of `order`; None when sessions are not concerned, or when workers will refuse it.

    Raises `MalformedRequest` for an `abort_all` that is neither true nor false: engines disagree about what it says.
    """
    try:
        fields = order.fields
    except VerbError:
        return None
    if order.verb == "/abort_request":
        abort_all = fields.get("abort_all", False)
        if not isinstance(abort_all, bool):
            raise MalformedRequest(f"abort_all: expected true or false, got {abort_all!r}", param="abort_all")
        return Intent.ABORT_ALL if abort_all else None
    intent = _BY_VERB.get(order.verb)
    is_labeled = intent is Intent.PART_OF_WEIGHTS and fields.get("weight_version") is not None
    return Intent.NEW_WEIGHTS if is_labeled else intent


@dataclass(frozen=True, slots=True)
class Trainer:
    """The state that the trainer's verbs have led to. A value: every step gives the next one."""

    is_pausing: bool = False
    """It has paused workers, and did not continue them yet."""
    due: float | None = None
    """When `then` happens unless another verb comes before; in seconds of the gatekeeper's lease clock."""
    then: Then = Then.OPEN

    @classmethod
    def of(cls, begun: str, *, until: float) -> "Trainer":
        """A trainer that had `begun` that when its router went away; it has until then to go on.

        A hold that does not say is taken for a pause, which nothing but the trainer ends.
        """
        match begun:
            case Begun.WEIGHTS:
                return cls(due=until)
            case Begun.ABORT:
                return cls(due=until, then=Then.END)
            case _:
                return cls(is_pausing=True)

    @property
    def begun(self) -> Begun | None:
        """See `Begun`; None when nothing is left to do."""
        if self.is_pausing:
            return Begun.PAUSE
        if self.due is None:
            return None
        return Begun.ABORT if self.then is Then.END else Begun.WEIGHTS

    @property
    def is_shut(self) -> bool:
        """The gate is held in the trainer's name."""
        return self.is_pausing or self.due is not None

    def sweeps_for(self, intent: Intent) -> bool:
        """Whether the live version has to score what waits for it before workers are told: it may disappear next.

        Workers that stand still score nothing, and what an update has begun to replace is no version any more.
        """
        is_update_under_way = self.due is not None and self.then is Then.OPEN
        return intent not in (Intent.CONTINUE, Intent.ABORT_ALL) and not self.is_pausing and not is_update_under_way

    def advance(self, intent: Intent, *, obeyed: int, until: float) -> "Trainer":
        """Workers were told, and `obeyed` of them did it.

        `until` is the end of the time that is allowed for another verb to follow.
        """
        # Said again and again until nothing runs, an abort may not put off the end that it waits for.
        is_repeated_abort = self.then is Then.END and intent is Intent.ABORT_ALL
        if is_repeated_abort or (self.is_pausing and intent is not Intent.CONTINUE):
            return self
        waits = Trainer(due=until)
        if not obeyed and intent is not Intent.CONTINUE:
            return waits if self.is_shut else self  # it may be tried again
        match intent:
            case Intent.CONTINUE | Intent.NEW_WEIGHTS:
                return Trainer()
            case Intent.PAUSE:
                return Trainer(is_pausing=True)
            case Intent.PART_OF_WEIGHTS:
                return waits
            case Intent.ABORT_ALL:
                return waits if self.is_shut else replace(waits, then=Then.END)

"""A trainer's SGLang verbs as holds on the sessions' gate. No I/O.

    verb                                     gate before    gate after
    /pause_generation                        shut, swept    shut until /continue_generation
    /update_weight_version, and
    /update_weights_* with a weight_version  shut, swept    open, unless workers were paused
    /update_weights_* without one            shut, swept    shut for a while: more may follow
    /abort_request with abort_all            shut           shut for a while: see below
    /continue_generation                     as it was      open
    any other                                as it was      as it was

An `abort_all` followed in time by a pause or new weights began an update: its turns continue. One that nothing follows
ended a rollout: its sessions end. `/continue_generation` means neither, a drain the end.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from harness.errors import MalformedRequest
from server_patch.router.verbs import VerbError, VerbOrder


class Intent(StrEnum):
    """Meaning of a verb for sessions."""

    PAUSE = "pause"
    CONTINUE = "continue"
    NEW_WEIGHTS = "new_weights"
    """Complete, labeled weights."""
    PART_OF_WEIGHTS = "part_of_weights"
    """Unlabeled weights, perhaps incomplete."""
    ABORT_ALL = "abort_all"


class Begun(StrEnum):
    """Unfinished work of a trainer, for which the gate is shut; its hold keeps it across a restart."""

    PAUSE = "pause"
    """It has paused workers and not continued them."""
    WEIGHTS = "weights"
    """Then the gate opens, unless a verb comes first."""
    ABORT = "abort"
    """Likewise, after every session has ended."""


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


def intent_of(order: VerbOrder) -> Intent | None:
    """Return the intent, or None if sessions are unaffected or workers will refuse. Raises `MalformedRequest`."""
    try:
        fields = order.fields
    except VerbError:
        return None
    if order.verb == "/abort_request":
        abort_all = fields.get("abort_all", False)
        if not isinstance(abort_all, bool):  # engines disagree about other values
            raise MalformedRequest(f"abort_all: expected true or false, got {abort_all!r}", param="abort_all")
        return Intent.ABORT_ALL if abort_all else None
    intent = _BY_VERB.get(order.verb)
    is_labeled = intent is Intent.PART_OF_WEIGHTS and fields.get("weight_version") is not None
    return Intent.NEW_WEIGHTS if is_labeled else intent


@dataclass(frozen=True, slots=True)
class Trainer:
    """State after the trainer's verbs; immutable."""

    begun: Begun | None = None
    due: float | None = None
    """End of the wait for a verb, on the lease clock; None during a pause."""

    @classmethod
    def of(cls, begun: str, *, until: float) -> "Trainer":
        """Restore a trainer from its hold after a restart. An unknown hold counts as a pause."""
        return cls(Begun(begun), until) if begun in (Begun.WEIGHTS, Begun.ABORT) else cls(Begun.PAUSE)

    def sweeps_for(self, intent: Intent) -> bool:
        """Return True if the live version must score pending tokens first, since it may disappear."""
        # Paused workers score nothing, and a half-replaced version is none.
        return intent not in (Intent.CONTINUE, Intent.ABORT_ALL) and self.begun in (None, Begun.ABORT)

    def advance(self, intent: Intent, *, obeyed: int, until: float) -> "Trainer":
        """Return the next state after `obeyed` workers did it; another verb may follow until `until`."""
        # An abort repeated until nothing runs must not postpone the end.
        is_repeated_abort = self.begun is Begun.ABORT and intent is Intent.ABORT_ALL
        if is_repeated_abort or (self.begun is Begun.PAUSE and intent is not Intent.CONTINUE):
            return self
        waits = Trainer(Begun.WEIGHTS, until)
        if not obeyed and intent is not Intent.CONTINUE:
            return waits if self.begun else self  # it may be tried again
        match intent:
            case Intent.CONTINUE | Intent.NEW_WEIGHTS:
                return Trainer()
            case Intent.PAUSE:
                return Trainer(Begun.PAUSE)
            case Intent.PART_OF_WEIGHTS:
                return waits
            case Intent.ABORT_ALL:
                return waits if self.begun else Trainer(Begun.ABORT, until)

"""What a filter of groups answers."""

from dataclasses import dataclass


@dataclass
class DynamicFilterOutput:
    """Whether a group is kept."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False

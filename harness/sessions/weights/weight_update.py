"""Bodies of `POST /sessions/sweep` and `POST /sessions/weights`, before and after a weight update."""

from typing import Annotated

import msgspec

Version = Annotated[int, msgspec.Meta(ge=0)]


class SweepRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /sessions/sweep`."""

    version: Version
    """Live policy version, about to be replaced."""
    budget_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 60.0
    concurrency: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 8


class SweepReport(msgspec.Struct):
    """Progress of a sweep."""

    version: int
    sessions: int = 0
    sessions_done: int = 0
    tokens_waiting: int = 0
    """At the start, or since."""
    tokens_settled: int = 0
    tokens_left: int = 0
    """Keep their behavior values."""
    tokens_incomparable: int = 0
    """On a scale that the engine cannot score."""
    tokens_read: int = 0
    """Input of scoring requests, cached included."""
    requests: int = 0
    failures: dict[str, int] = {}
    """By error code."""
    seconds: float = 0.0
    is_running: bool = True


class ExpectedWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /sessions/weights`."""

    version: Version


class LiveWeights(msgspec.Struct, frozen=True):
    """Weights that the workers report."""

    version: int
    serving: dict[str, str]
    """Version per serving worker."""
    fenced: dict[str, str]
    """Version per fenced worker."""
    problems: tuple[str, ...] = ()
    """See `GateReport.problems`."""

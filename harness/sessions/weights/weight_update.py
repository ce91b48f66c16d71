"""The questions of a weight update to a session server, and the answers: the bodies of its two admin verbs.

`POST /sessions/sweep` before the update, `POST /sessions/weights` after it; whoever drives the update and the server
speak the same types.
"""

from typing import Annotated

import msgspec

Version = Annotated[int, msgspec.Meta(ge=0)]


class SweepRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /sessions/sweep`."""

    version: Version
    """The policy version that is live and about to be replaced."""
    budget_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 60.0
    """After that much time the sweep ends wherever it stands."""
    concurrency: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 8
    """Sessions that are scored at the same time."""


class SweepReport(msgspec.Struct):
    """The work of a sweep so far; grows while it runs."""

    version: int
    sessions: int = 0
    """Sessions with tokens that waited for the version."""
    sessions_done: int = 0
    tokens_waiting: int = 0
    """Tokens that waited when the sweep began, or came to wait meanwhile."""
    tokens_settled: int = 0
    """Tokens that met their next version in this sweep."""
    tokens_left: int = 0
    """Tokens that still wait; after the update they keep their behavior values."""
    tokens_incomparable: int = 0
    """Tokens sampled on a scale on which the engine cannot score."""
    tokens_read: int = 0
    """Input tokens of the scoring requests, those in the engine's cache included."""
    requests: int = 0
    failures: dict[str, int] = {}
    """Requests that failed, by error code."""
    seconds: float = 0.0
    is_running: bool = True


class ExpectedWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /sessions/weights`."""

    version: Version
    """The policy version that every worker is meant to serve now."""


class LiveWeights(msgspec.Struct, frozen=True):
    """The weights that the workers of a server serve, by their own word."""

    version: int
    """The version that was expected."""
    serving: dict[str, str]
    """Weight version by worker, of those that serve sessions."""
    fenced: dict[str, str]
    """Weight version by worker, of those that serve nobody."""
    problems: tuple[str, ...] = ()
    """A line for each shard of the server that did not say; see `docs/scaling.md`."""

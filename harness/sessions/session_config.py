"""Decisions of a session's owner, which survive a restart."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from harness.samples.delivery import TRAINED_ROLES, Selection
from harness.samples.roles import Role
from harness.sessions.admission import Limits
from harness.sessions.ledger import NOTHING_UNKNOWN, Unknown
from harness.sessions.script import Script
from harness.tokens.matching import ChainKey
from harness.types import Json, SamplingWishes


class AfterIncomplete(StrEnum):
    """Answer to a request that extends an incomplete turn."""

    REFUSE = "refuse"
    """404: those tokens could never be trained."""
    SERVE = "serve"
    """Continue (evaluation); the merge rule drops the tail."""


class StreamingMode(StrEnum):
    """Time when streamed text is sent."""

    RECORDED = "recorded"
    """Once the turn is durable."""
    LIVE = "live"
    """As it is sampled; tool calls and the end once durable."""


class Strays(StrEnum):
    """Treatment of other programs' calls; never trained."""

    SERVE = "serve"
    REFUSE = "refuse"


class Recorded(StrEnum):
    """Rows to record with tokens; see `token_rows`."""

    ROUTED_EXPERTS = "routed_experts"
    SAMPLING_MASK = "sampling_mask"


class MissingRowsPolicy(StrEnum):
    """Treatment of turns that lack rows."""

    MASK = "mask"
    """Deliver them; the column says which rows are present."""
    REQUIRE = "require"
    """End the sample before the first of them."""


@dataclass(frozen=True, slots=True)
class Edit:
    """Text of a message as the model reads it (`sessions.edits`)."""

    message: int
    """Index in the conversation."""
    content: str
    place: ChainKey = b""
    """Conversation up to the recorded message; set by the server."""


@dataclass(frozen=True, slots=True)
class Inheritance:
    """Earlier session whose record the session begins with (`sessions.inheritance`)."""

    session_id: str
    before: int | None = None
    """Turn from which on nothing is inherited; None inherits all."""
    trained: bool = True
    """False masks inherited tokens."""
    strict: bool = False
    """Refuse a call that repeats none of the inherited ones, while any is left."""
    edits: tuple[Edit, ...] = ()
    """Texts for messages that turn `before` adds."""

    def to_json(self) -> Json:
        """Return the field of `POST /sessions`."""
        return {**asdict(self), "edits": [{"message": each.message, "content": each.content} for each in self.edits]}


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """Owner's decisions at creation."""

    metadata: Mapping[str, Any] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    sampling: SamplingWishes = field(default_factory=SamplingWishes)
    after_incomplete: AfterIncomplete = AfterIncomplete.REFUSE
    selection: str = Selection.ALL
    """`Selection`, or a function's path."""
    trained_roles: tuple[Role, ...] = TRAINED_ROLES
    strays: Strays = Strays.SERVE
    matching: tuple[str, ...] = ()
    """Rules in addition to the default (`tokens.matching.normal_form`)."""
    streaming: StreamingMode | None = None
    """None: server default."""
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    request_template_variables: bool | None = None
    """None: only with `AfterIncomplete.SERVE`."""
    strict: bool = False
    """Refuse calls with unserved fields."""
    record: tuple[Recorded, ...] = ()
    missing_rows: MissingRowsPolicy = MissingRowsPolicy.MASK
    teachers: tuple[str, ...] | None = None
    """Teachers that score sampled tokens; None: all of the server."""
    script: Script | None = None
    resumes: str | None = None
    """See `sessions.takeover`."""
    inherits: Inheritance | None = None
    session_id: str | None = None
    """32 hex digits."""
    left_behind: int = 0
    """Tokens of the resumed session's turns that do not move."""
    unknown_left_behind: Unknown = NOTHING_UNKNOWN

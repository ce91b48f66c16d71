"""The decisions of a session's owner, made when it is created. They do not change, and a restart brings them back."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from harness.samples.delivery import TRAINED_ROLES, Selection
from harness.samples.roles import Role
from harness.sessions.admission import Limits
from harness.sessions.ledger import NOTHING_UNKNOWN, Unknown
from harness.sessions.script import Script
from harness.types import SamplingWishes


class AfterIncomplete(StrEnum):
    """The ways of a session when an agent wants to extend a turn that is not COMPLETED."""

    REFUSE = "refuse"
    """Answer 404: those tokens could never be trained."""
    SERVE = "serve"
    """Go on (evaluation); the merge rule drops and counts the tail."""


class StreamingMode(StrEnum):
    """The two ways."""

    RECORDED = "recorded"
    """When the turn is durable, all of it."""
    LIVE = "live"
    """Reasoning and content as they are sampled; tool calls and the end when the turn is durable."""


class Strays(StrEnum):
    """What becomes of a call of another program than the agent; none is ever trained."""

    SERVE = "serve"
    """It is answered and recorded."""
    REFUSE = "refuse"
    """Answer 403."""


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """The decisions of a session's owner when it was created."""

    metadata: Mapping[str, Any] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    sampling: SamplingWishes = field(default_factory=SamplingWishes)
    """Replaces what the agent asks for."""
    after_incomplete: AfterIncomplete = AfterIncomplete.REFUSE
    selection: str = Selection.ALL
    """A `Selection`, or the path of a function."""
    trained_roles: tuple[Role, ...] = TRAINED_ROLES
    strays: Strays = Strays.SERVE
    matching: tuple[str, ...] = ()
    """How a history that is sent back is compared, beside the default (`tokens.matching.normal_form`)."""
    streaming: StreamingMode | None = None
    """When the text of streamed answers goes out; None leaves it to the server."""
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, beside the server's."""
    request_template_variables: bool | None = None
    """A request may set others; None allows it where a session goes on after an incomplete turn (evaluation)."""
    strict: bool = False
    """A call is refused that has a field which the server does not serve."""
    script: Script | None = None
    """The words of its turns; None leaves them to the model."""
    resumes: str | None = None
    """The drained session whose turns this one takes over (`sessions.takeover`)."""
    session_id: str | None = None
    """Its id, 32 hex digits, where its owner has chosen it."""
    left_behind: int = 0
    """Tokens that were sampled for turns of that session which do not come along."""
    unknown_left_behind: Unknown = NOTHING_UNKNOWN
    """Tokens that may have been sampled for them, and were not handed over."""

"""The bodies of `POST /sessions` and of the verbs of the gate, checked field by field."""

from collections.abc import Collection
from typing import Annotated, Any, TypeVar

import msgspec

from harness.dialects.json_values import check_json
from harness.errors import MalformedRequest
from harness.samples.merge import Selection
from harness.sessions.admission import Limits
from harness.sessions.gate import ANONYMOUS
from harness.sessions.session import AfterIncomplete, SessionConfig
from harness.tokens.matching import Matching
from harness.types import SamplingWishes

_T = TypeVar("_T")

NAMED_TTL_S = 60.0
"""How long a hold lasts whose holder does not say; it is renewed by the same verb."""
ANONYMOUS_TTL_S = 3600.0
"""The same for a verb that names no holder: nobody renews it."""

_Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
_Text = Annotated[str, msgspec.Meta(min_length=1)]


class _Limits(msgspec.Struct, forbid_unknown_fields=True):
    turns: _Count | None = None
    tokens_per_turn: _Count | None = None
    tokens_per_session: _Count | None = None
    staleness: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None


class _Sampling(msgspec.Struct, forbid_unknown_fields=True):
    max_tokens: _Count | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None
    stop: tuple[_Text, ...] = ()


class _CreateSession(msgspec.Struct, forbid_unknown_fields=True):
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)
    limits: _Limits = msgspec.field(default_factory=_Limits)
    sampling: _Sampling = msgspec.field(default_factory=_Sampling)
    after_incomplete: AfterIncomplete = AfterIncomplete.REFUSE
    selection: Selection = Selection.LAST
    matching: tuple[str, ...] = ()
    resumes: str | None = None


_Holder = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class HoldRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /sessions/pause` and `POST /sessions/drain`."""

    holder: _Holder = ANONYMOUS
    ttl_s: Annotated[float, msgspec.Meta(ge=0.05, le=86_400)] | None = None
    engines: bool = False

    @property
    def seconds(self) -> float:
        """How long the hold lasts unless it is renewed."""
        return self.ttl_s or (ANONYMOUS_TTL_S if self.holder == ANONYMOUS else NAMED_TTL_S)


class ReleaseRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /sessions/resume`."""

    holder: _Holder = ANONYMOUS
    engines_continued: bool = False


class EndRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /sessions/{id}/end`."""

    within_s: Annotated[float, msgspec.Meta(ge=0, le=600)] = 10.0
    """How long the answer may wait for turns in flight."""


_sessions = msgspec.json.Decoder(_CreateSession)
_holds = msgspec.json.Decoder(HoldRequest)
_endings = msgspec.json.Decoder(EndRequest)
_releases = msgspec.json.Decoder(ReleaseRequest)


def parse_session_config(body: bytes, custom_matchings: Collection[str] = ()) -> SessionConfig:
    """The configuration in `body`; an empty body means the defaults.

    `custom_matchings` are the `package.module:function` paths that the operator allows: a path in a request names code.
    Raises `MalformedRequest` naming the field.
    """
    wire = _read(_sessions, body)
    check_json(wire.metadata, "metadata")
    return SessionConfig(
        metadata=wire.metadata,
        limits=Limits(**msgspec.structs.asdict(wire.limits)),
        sampling=_wishes(wire.sampling),
        after_incomplete=wire.after_incomplete,
        selection=wire.selection,
        matching=_offered(wire.matching, custom_matchings),
        resumes=wire.resumes,
    )


def parse_hold(body: bytes) -> HoldRequest:
    """The hold that `body` asks for; an empty one asks for the anonymous hold. Raises `MalformedRequest`."""
    return _read(_holds, body)


def parse_end(body: bytes) -> EndRequest:
    """How `body` wants a session ended; an empty one means the defaults. Raises `MalformedRequest`."""
    return _read(_endings, body)


def parse_release(body: bytes) -> ReleaseRequest:
    """The hold that `body` releases; an empty one releases the anonymous hold. Raises `MalformedRequest`."""
    return _read(_releases, body)


def _read(decoder: msgspec.json.Decoder[_T], body: bytes) -> _T:
    """What `body` says, an empty one nothing but defaults. Raises `MalformedRequest` naming the field."""
    try:
        return decoder.decode(body or b"{}")
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        field = path.rstrip("`").lstrip(".")
        raise MalformedRequest(f"{field or 'body'}: {what}", param=field or None) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedRequest(f"expected a JSON object, the body is not JSON: {error}") from error


def _wishes(wire: _Sampling) -> SamplingWishes:
    wishes = msgspec.structs.asdict(wire)
    return SamplingWishes(max_new_tokens=wishes.pop("max_tokens"), min_new_tokens=wishes.pop("min_tokens"), **wishes)


def _offered(matching: tuple[str, ...], custom: Collection[str]) -> tuple[str, ...]:
    offered = [*Matching, *custom]
    for name in matching:
        if name not in offered:
            raise MalformedRequest(f"matching: expected some of {', '.join(offered)}; got {name!r}", param="matching")
    return matching

"""Bodies of session and gate requests, with size limits for all. Parsers raise `MalformedRequest`."""

from collections.abc import Callable, Collection
from typing import Annotated, Any, TypeVar

import msgspec
from starlette.requests import Request

from harness.decoding import convert, json_decoder, read_json
from harness.dialects.json_values import check_json, decode_json
from harness.dialects.request_limits import DEFAULT_LIMITS, RequestLimits
from harness.errors import BodyTooLarge, MalformedRequest, TooSlow
from harness.machine.deadlines import Deadline
from harness.samples.delivery import DEPRECATED_SELECTIONS, TRAINABLE_ROLES, TRAINED_ROLES, Selection
from harness.samples.roles import Role
from harness.server.http.packed_body import unpack_body
from harness.server.scripts import ScriptText
from harness.sessions.admission import Limits
from harness.sessions.script import Script
from harness.sessions.session_config import (
    AfterIncomplete,
    Inheritance,
    MissingRowsPolicy,
    Recorded,
    SessionConfig,
    Strays,
    StreamingMode,
)
from harness.sessions.weights.weight_update import ExpectedWeights
from harness.tokens.matching import OFFERED, Matching
from harness.types import SamplingWishes

_SHOWN = 20  # digits of a declared length

_Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
_TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Text = Annotated[str, msgspec.Meta(min_length=1)]
_SessionId = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]


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
    stop_token_ids: tuple[_TokenId, ...] = ()


class _Edit(msgspec.Struct, forbid_unknown_fields=True):
    message: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    content: str


class _Inherits(msgspec.Struct, forbid_unknown_fields=True):
    session_id: _SessionId
    before: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    trained: bool = True
    strict: bool = False
    edits: tuple[_Edit, ...] = ()


class _CreateSession(msgspec.Struct, forbid_unknown_fields=True):
    metadata: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"{}"))
    limits: _Limits = msgspec.field(default_factory=_Limits)
    sampling: _Sampling = msgspec.field(default_factory=_Sampling)
    after_incomplete: AfterIncomplete = AfterIncomplete.REFUSE
    selection: str = Selection.ALL
    trained_roles: tuple[Role, ...] = TRAINED_ROLES
    strays: Strays = Strays.SERVE
    matching: tuple[str, ...] = ()
    streaming: StreamingMode | None = None
    template_variables: dict[str, Any] = msgspec.field(default_factory=dict)
    request_template_variables: bool | None = None
    strict: bool = False
    record: tuple[Recorded, ...] = ()
    missing_rows: MissingRowsPolicy = MissingRowsPolicy.MASK
    teachers: tuple[str, ...] | None = None
    resumes: str | None = None
    inherits: _Inherits | None = None
    session_id: _SessionId | None = None
    script: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"null"))


class EndRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /sessions/{id}/end`."""

    within_s: Annotated[float, msgspec.Meta(ge=0, le=600)] = 10.0
    """Longest wait in seconds for turns in flight."""


class CollectRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /sessions/{id}/samples`, as miles sends it."""

    max_seq_len: _Count | None = None
    """Most tokens of a sample."""
    metadata: dict[str, Any] | None = None
    """Result of the agent; miles sends none to session servers that answer one sample."""


_sessions = json_decoder(_CreateSession)
_scripts = json_decoder(ScriptText | None)
_metadata_decoder = json_decoder(dict[str, Any])
_Fields = TypeVar("_Fields", bound=msgspec.Struct)


async def read_body(request: Request, limits: RequestLimits, count: Callable[[int], None] | None = None) -> bytes:
    """Read and unpack the request body within limits.

    `count` gets the bytes as they arrive and are unpacked, and may refuse them. A body with too long a declared length
    is not read. Raises `BodyTooLarge`, `TooSlow`, `EncodingRefused`, `MalformedRequest`.
    """
    declared, encoding = request.headers.get("content-length", ""), request.headers.get("content-encoding", "")
    chunks: list[bytes] = []
    size_bytes = 0
    if not declared.isdecimal() or (len(declared) <= _SHOWN and int(declared) <= limits.body_bytes):
        try:
            with Deadline(limits.body_seconds):
                async for chunk in request.stream():
                    chunks.append(chunk)
                    size_bytes += len(chunk)
                    if size_bytes > limits.body_bytes:
                        break
                    if count is not None:
                        count(len(chunk))
                else:
                    body = b"".join(filter(None, chunks))  # the last is empty: one chunk alone is not copied
                    if encoding.strip().lower() not in ("", "identity"):
                        body = await unpack_body(body, encoding.strip().lower(), limits.body_bytes)
                        if count is not None:
                            count(max(0, len(body) - size_bytes))
                    return body
        except TimeoutError as error:
            raise TooSlow(
                f"body: expected within {limits.body_seconds} s (the server's limit `body_seconds`)",
                limit="body_seconds",
            ) from error
    raise BodyTooLarge(
        f"body: expected at most {limits.body_bytes} bytes (the server's limit `body_bytes`),"
        f" got {declared[:_SHOWN] or f'{size_bytes} and more'}",
        limit="body_bytes",
    )


def parse_session_config(
    body: bytes,
    custom_matchings: Collection[str] = (),
    custom_selections: Collection[str] = (),
    limits: RequestLimits = DEFAULT_LIMITS,
    *,
    read_script: Callable[[ScriptText], Script] | None = None,
) -> SessionConfig:
    """Parse the configuration; an empty body means the defaults.

    `custom_matchings` and `custom_selections` are the allowed `package.module:function` paths, since a path names code.
    `read_script` converts a script to ids; None allows none. Raises `MalformedRequest` naming the field, `OverLimit`
    naming the limit, and as `read_script`.
    """
    wire = decode_json(_sessions, body or b"{}")
    limits.require("metadata_bytes", memoryview(wire.metadata).nbytes, "metadata")
    metadata = decode_json(_metadata_decoder, wire.metadata, "metadata")
    check_json(metadata, "metadata", limits.json_depth)
    check_json(wire.template_variables, "template_variables", limits.json_depth)
    wishes = msgspec.structs.asdict(wire.sampling)
    max_new_tokens, min_new_tokens = wishes.pop("max_tokens"), wishes.pop("min_tokens")
    sampling = SamplingWishes(max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens, **wishes)
    limits.check_sampling(sampling)
    limits.require("script_bytes", memoryview(wire.script).nbytes, "script")
    script = decode_json(_scripts, wire.script, "script")
    if script is not None and read_script is None:
        raise MalformedRequest("script: expected none here", param="script")
    for name in wire.matching:
        if name not in (*Matching, *custom_matchings) and not (name.startswith("/") and name.endswith("/")):
            known = ", ".join((*OFFERED, *custom_matchings))
            raise MalformedRequest(f"matching: expected some of {known}; got {name!r}", param="matching")
    selections = [*Selection, *DEPRECATED_SELECTIONS, *custom_selections]
    if wire.selection not in selections:
        offered = [*Selection, *custom_selections]
        raise MalformedRequest(
            f"selection: expected one of {', '.join(offered)}; got {wire.selection[:64]!r}", param="selection"
        )
    if not wire.trained_roles or not TRAINABLE_ROLES.issuperset(wire.trained_roles):
        raise MalformedRequest(
            f"trained_roles: expected some of {', '.join(sorted(TRAINABLE_ROLES))}; got"
            f" {', '.join(wire.trained_roles) or 'none'}",
            param="trained_roles",
        )
    if wire.inherits is not None and wire.resumes is not None:
        raise MalformedRequest("inherits: expected none with resumes", param="inherits")
    read = {
        "metadata": metadata,
        "limits": Limits(**msgspec.structs.asdict(wire.limits)),
        "sampling": sampling,
        "script": None if script is None or read_script is None else read_script(script),
        "inherits": wire.inherits and convert(wire.inherits, Inheritance, from_attributes=True),
    }
    return SessionConfig(**msgspec.structs.asdict(wire) | read)


async def read_fields(request: Request, limits: RequestLimits, kind: type[_Fields]) -> _Fields:
    """Read a body of that `kind`; an empty one means the defaults. Raises as `read_body`."""
    return decode_json(json_decoder(kind), await read_body(request, limits) or b"{}")


def parse_expected(body: bytes) -> ExpectedWeights:
    """Parse the version that all workers should serve."""
    try:
        return read_json(body, ExpectedWeights)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedRequest(f"expected {{'version': N}}, got {error}", param="version") from error

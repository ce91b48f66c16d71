"""Fields of a body that a dialect does not serve: which ones came, and how the record says so.

They are ignored, since clients send much that only the vendor understands, and noted by name, since one of them may
have been meant to change what is sampled. A value is noted where it is a setting that the dialect names; any other may
hold a secret. A session that is `strict` refuses them (`Session.require_served`).
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from harness.dialects.json_values import check_json, decode_json
from harness.errors import MalformedRequest, RequestError
from harness.types import Json

NULL = msgspec.Raw(b"null")
"""A field that was not sent."""
MOST_NOTED = 16
"""Fields in one list of a turn's notes."""
LONGEST_NOTE = 500
"""Bytes of a name, and of a value's JSON."""
_LEVELS = 16
_SCHEMA = "the answer's schema is asked for with `response_format`"
REFUSED: Mapping[str, str] = {
    "functions": "functions are offered as `tools`",
    "function_call": "a call is asked for with `tool_choice`",
    "guided_json": _SCHEMA,
    "guided_regex": _SCHEMA,
    "guided_choice": _SCHEMA,
    "guided_grammar": _SCHEMA,
    "structured_outputs": _SCHEMA,
    "regex": _SCHEMA,
    "ebnf": _SCHEMA,
    "json_schema": _SCHEMA,
    "repetition_penalty": "such logprobs are not the model's",
    "chat_template": "the operator chooses it, `harness serve --template`",
    "chat_template_kwargs": "only chat completions set variables of the template, or the session does",
}
"""Wishes that change the prompt or the sampling, which no dialect serves under these names, and what to do instead."""

_T = TypeVar("_T", bound=msgspec.Struct)
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_value_decoder = msgspec.json.Decoder(Any)


def decode_and_find_unknown(
    exact: msgspec.json.Decoder[_T], tolerant: msgspec.json.Decoder[_T], body: bytes
) -> tuple[_T, list[str]]:
    """What `body` says to `tolerant`, and the names of the fields in it that its type does not have.

    `exact` has the same fields and refuses others: a body that has none, as nearly all, is decoded once.
    Raises `MalformedRequest` as `decode_json`.
    """
    try:
        return exact.decode(body), []
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        wire = decode_json(tolerant, body)
    fields = decode_json(_fields_decoder, body)
    return wire, [name for name, raw in fields.items() if name not in wire.__struct_fields__ and raw != NULL]


def find_ignored(
    wire: msgspec.Struct, settings: Mapping[str, tuple[bytes, ...]], others: Iterable[str], unknown: Iterable[str]
) -> dict[str, Any]:
    """The fields that came and are not served, with their values; None for a value that may be a secret.

    `settings` and `others` name fields of `wire` that are kept as `msgspec.Raw`. A setting has the values at which
    nothing is ignored. Raises `MalformedRequest` naming one that must not be ignored.
    """
    unknown = list(unknown)
    for name in unknown:
        if name in REFUSED:
            raise MalformedRequest(f"{name}: expected none, {REFUSED[name]}", param=name)
    found: dict[str, Any] = {}
    for name, neutral in settings.items():
        raw = bytes(getattr(wire, name))
        if raw != b"null" and raw not in neutral:
            found[name] = _shorten(raw)
    names = [name for name in others if getattr(wire, name) != NULL]
    return found | {name[:LONGEST_NOTE]: None for name in (*names, *unknown)}


def note_ignored(ignored: Mapping[str, Any]) -> Json:
    """The note of a turn, for as many as it holds; no note where nothing was ignored."""
    return {"ignored": dict(list(ignored.items())[:MOST_NOTED])} if ignored else {}


def _shorten(raw: bytes) -> Any:
    """The value as it is, where it is short and can be kept; else the beginning of its text."""
    try:
        value = decode_json(_value_decoder, raw[: LONGEST_NOTE + 1])
        check_json(value, "", _LEVELS)
    except RequestError:
        return raw[:LONGEST_NOTE].decode(errors="replace")
    return value

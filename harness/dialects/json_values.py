"""Decoding of clients' JSON, with errors that name the field.

Encoders, templates and databases recurse into such values and hold integers in 64 bits. A value that would break one of
them is refused here, where its field can still be named.
"""

from itertools import chain
from typing import Any, TypeVar

import msgspec

from harness.decoding import json_decoder
from harness.dialects.request_limits import RequestLimits
from harness.errors import MalformedRequest, OverLimit

_T = TypeVar("_T")

_INTEGERS = range(-(2**63), 2**64)

_object_decoder = json_decoder(dict[str, Any])


def decode_json(decoder: msgspec.json.Decoder[_T], content: bytes | msgspec.Raw, within: str = "") -> _T:
    """Decode `content`: the field `within` of a request, or its body. Raises `MalformedRequest` naming the field."""
    try:
        return decoder.decode(content)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        field = (within + path.rstrip("`")).lstrip(".")
        if what.startswith("Object contains unknown field") and not path:
            what += f"; known: {', '.join(getattr(decoder.type, '__struct_fields__', ()))}"
        raise MalformedRequest(f"{field or 'body'}: {what}", param=field or None) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedRequest(f"expected a JSON object, the body is not JSON: {error}") from error


def decode_schema(raw: msgspec.Raw, limits: RequestLimits, param: str, within: str) -> dict[str, Any]:
    """Decode the field `within`, the JSON schema of an answer. Raises `MalformedRequest`, or `OverLimit` on `param`."""
    limits.require("schema_bytes", memoryview(raw).nbytes, param)
    schema = decode_json(_object_decoder, raw, within)
    check_json(schema, param, limits.json_depth)
    return schema


def check_bounds(param: str, value: float | None, low: float, high: float) -> None:
    """Raise `MalformedRequest` naming `param` if `value` is stated and outside the bounds (inclusive)."""
    if value is not None and not low <= value <= high:
        raise MalformedRequest(f"{param}: expected {low}..{high}, got {value}", param=param)


def check_json(value: Any, param: str, deepest: int) -> None:
    """Raise `OverLimit` naming `param` beyond `deepest` levels, `MalformedRequest` for an integer beyond 64 bits."""
    # Level by level, since recursion would overflow on what this refuses.
    level = [value]
    for _ in range(deepest):
        if any(type(each) is int and each not in _INTEGERS for each in level):
            raise MalformedRequest(f"{param}: an integer in it does not fit into 64 bits", param=param)
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = list(chain.from_iterable(inner))
        if not level:
            return
    raise OverLimit(
        f"{param}: it is nested more than {deepest} levels deep (the server's limit `json_depth`)",
        limit="json_depth",
        param=param,
    )

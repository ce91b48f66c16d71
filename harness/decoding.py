"""JSON, msgpack and plain values read as types, in any thread.

msgspec examines a class when it first decodes it. If a second thread decodes that class meanwhile, msgspec (0.22 at
least) reads unfinished memory and the process dies with SIGSEGV. So one thread at a time examines, and no other module
gives msgspec a type.
"""

import threading
from types import UnionType
from typing import Any, TypeVar, overload

import msgspec

_T = TypeVar("_T")
_examining = threading.Lock()
_json_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_msgpack_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


@overload
def json_decoder(kind: type[_T]) -> msgspec.json.Decoder[_T]: ...
@overload
def json_decoder(kind: UnionType) -> msgspec.json.Decoder[Any]: ...
def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """Return the decoder of `kind`."""
    if kind not in _json_decoders:
        with _examining:
            _json_decoders[kind] = msgspec.json.Decoder(kind)
    return _json_decoders[kind]


def read_json(content: bytes | str | msgspec.Raw, kind: type[_T]) -> _T:
    """Decode JSON. Raises `msgspec.DecodeError`."""
    return json_decoder(kind).decode(content)


def read_msgpack(content: bytes, kind: type[_T]) -> _T:
    """Decode msgpack. Raises `msgspec.DecodeError`."""
    if kind not in _msgpack_decoders:
        with _examining:
            _msgpack_decoders[kind] = msgspec.msgpack.Decoder(kind)
    read: _T = _msgpack_decoders[kind].decode(content)
    return read


def convert(value: object, kind: type[_T], *, from_attributes: bool = False) -> _T:
    """Convert plain values, or objects `from_attributes`. Raises `msgspec.ValidationError`."""
    json_decoder(kind)  # examines it
    return msgspec.convert(value, kind, from_attributes=from_attributes)

"""Server-sent events as bytes, for every dialect that streams. `engines` reads those of servers."""

from collections.abc import Iterator

import msgspec

from harness.types import Json

MEDIA_TYPE = "text/event-stream"

_SHORTEST_PIECE = 128  # characters
_MOST_PIECES = 32

_encoder = msgspec.json.Encoder()
# JSON leaves these as they are, but clients that split decoded lines would cut an event in two there.
_ESCAPES = {character.encode(): f"\\u{ord(character):04x}".encode() for character in "\x85\u2028\u2029"}


def text_pieces(text: str) -> Iterator[str]:
    """Split a text into deltas: several for a client that displays them, few for one that parses them."""
    size = max(_SHORTEST_PIECE, -(-len(text) // _MOST_PIECES))
    return (text[start : start + size] for start in range(0, len(text), size))


def event(value: Json, name: str = "") -> bytes:
    """Return an event with `value` as data, named where clients tell events apart by name."""
    return (f"event: {name}\n".encode() if name else b"") + raw_event(_encoder.encode(value))


def raw_event(data: bytes) -> bytes:
    """Return an event with one line of `data`: JSON or a word."""
    assert b"\n" not in data, data
    if not data.isascii():
        for text, escape in _ESCAPES.items():
            data = data.replace(text, escape)
    return b"data: " + data + b"\n\n"

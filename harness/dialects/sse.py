"""Server-sent events as the bytes that go out.

Every dialect that streams writes its events with these. Reading events of engines is `engines.event_stream`.
"""

from collections.abc import Iterator

import msgspec

from harness.types import Json

MEDIA_TYPE = "text/event-stream"

_SHORTEST_PIECE = 128  # characters
_MOST_PIECES = 32

_encoder = msgspec.json.Encoder()
# Text that JSON leaves as it is, and at which clients that split decoded lines would cut an event in two.
_ESCAPES = {character.encode(): f"\\u{ord(character):04x}".encode() for character in "\x85\u2028\u2029"}


def text_pieces(text: str) -> Iterator[str]:
    """A text in pieces, one for each delta: several for a client that shows them, few for one that parses them."""
    size = max(_SHORTEST_PIECE, -(-len(text) // _MOST_PIECES))
    return (text[start : start + size] for start in range(0, len(text), size))


def event(value: Json, name: str = "") -> bytes:
    """An event with `value` as its data, called `name` where clients tell events apart by a name."""
    return (f"event: {name}\n".encode() if name else b"") + raw_event(_encoder.encode(value))


def raw_event(data: bytes) -> bytes:
    """An event with `data`: JSON, or a word, in one line."""
    assert b"\n" not in data, data
    if not data.isascii():
        for text, escape in _ESCAPES.items():
            data = data.replace(text, escape)
    return b"data: " + data + b"\n\n"

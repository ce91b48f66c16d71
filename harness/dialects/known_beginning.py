"""Bodies that begin like the one before. Only what follows is decoded.

A client sends its whole history with each call. The state of a JSON parser depends on the bytes before alone. So behind
a known message it stands in the array of messages, and one element, which no client can guess, takes the place of all
that are known. Whatever does not look like that is decoded as a whole.
"""

import re
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, TypeVar

import msgspec

from harness.dialects.ignored import BodyDecoder
from harness.dialects.model_request import PartlyRead, WireCall
from harness.errors import MalformedRequest
from harness.tokens.history import Beginning, History

_BETWEEN = re.compile(rb"[ \t\r\n]*,?[ \t\r\n]*")


class BodyWithMessages(msgspec.Struct):
    messages: list[msgspec.Raw]


_T = TypeVar("_T", bound=BodyWithMessages)


class SentMessages(NamedTuple):
    messages: Sequence[msgspec.Raw]
    elements: slice | None = None
    """Their bytes in the body, if known."""
    begins: Beginning | None = None
    """Known beginning of the body."""


def decode_body(
    decoder: BodyDecoder[_T], call: WireCall, history: History | None
) -> tuple[_T, list[str], SentMessages]:
    """Decode a body. Return it without the known messages, the unknown fields, and all messages.

    Raises as `BodyDecoder.decode`.
    """
    body, sent = call.body, call.sent
    if sent is None or history is None:
        wire, unknown = decoder.decode(body)
        return wire, unknown, SentMessages(wire.messages)
    placeholder = msgspec.Raw(b'"%s"' % sent.key.hex().encode())

    def decode_with(elements: slice) -> tuple[_T, list[str]] | None:
        """Decode the body with the placeholder for some elements; None unless it is the first message."""
        try:
            wire, unknown = decoder.decode(b"".join((body[: elements.start], placeholder, body[elements.stop :])))
        except MalformedRequest:
            return None
        return (wire, unknown) if wire.messages and wire.messages[0] == placeholder else None

    begins = history.beginning(sent)
    if begins is not None and (found := decode_with(begins.elements)) is not None:
        wire, unknown = found
        new, read = wire.messages[1:], cache(lambda: decoder.decode(body)[0].messages)
        messages = PartlyRead(len(begins.recall.digests) - 1, tuple(new), lambda number: read()[number])
        return wire, unknown, SentMessages(messages, _extend(begins.elements, body, new), begins)
    wire, unknown = decoder.decode(body)
    start = body.find(wire.messages[0]) if wire.messages else 0
    elements = _extend(slice(start, start), body, wire.messages)
    if elements is not None and decode_with(elements) is None:  # equal messages that do not count
        elements = None
    return wire, unknown, SentMessages(wire.messages, elements)


def _extend(elements: slice, body: bytes, raws: Sequence[msgspec.Raw]) -> slice | None:
    # Objects end themselves. So where one is found behind another, the parser has found it, too.
    end = elements.stop
    for raw in map(bytes, raws):
        between = _BETWEEN.match(body, end)
        if between is None or not body.startswith(raw, between.end()):
            return None
        end = between.end() + len(raw)
    return slice(elements.start, end)

"""Recognising a history that a client sends back: one key per message, chained.

`chain_keys` gives for each prefix of a conversation a digest that depends on every message (and the tools) in it, so
the deepest stored turn that a request extends is found by looking up digests, not by comparing messages. Two messages
have the same key exactly when they are the same after the dialect's normalisation; differences a client makes by
itself (None against an empty text, unknown extra fields) are gone by then.
"""

from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from harness.types import Json, Message

ChainKey = bytes
"""blake2b-128 over a conversation prefix."""

_encoder = msgspec.json.Encoder(order="deterministic")


def chain_keys(messages: Sequence[Message], tools: Sequence[Json]) -> list[ChainKey]:
    """Digests of all prefixes: element i covers the tools and the first i messages; length is `len(messages) + 1`."""
    keys = [_digest(b"", tools)]
    for message in messages:
        keys.append(next_key(keys[-1], message))
    return keys


def next_key(key: ChainKey, message: Message) -> ChainKey:
    """The digest of the prefix `key` stands for with `message` appended."""
    return _digest(key, _normal_form(message))


def _normal_form(message: Message) -> Json:
    return {name: value for name, value in message.items() if value not in (None, "", [])}


def _digest(key: bytes, value: object) -> ChainKey:
    return blake2b(key + _encoder.encode(value), digest_size=16).digest()

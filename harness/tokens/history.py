"""Histories that were read before, recognized by their bytes.

A client sends its whole conversation with each call. What the reading of a raw message came to, in some dialects to
several messages, is kept under a digest of its bytes and of everything before it, the dialect and the tools included;
the same bytes at the same place are not read again. Within a session equal bytes have an equal reading, so recognizing
one changes no result: a body that spells old messages in another way is read from there on, and comes to the same.

Where a dialect completes a message by what the session recorded, under the id of a call or the signature of a reply,
this holds for ids and signatures that were handed out: they leave the server with a reply that is recorded. Under one
that a client guesses before, nothing is found, and that reading stays.

An index of one session, and bounded in raw messages and in those that they came to: a client that sends other histories
all the time has them read each time. It keeps neither texts nor messages; of tools, those of the last request.
"""

from collections.abc import Sequence
from hashlib import sha256
from itertools import repeat
from typing import NamedTuple, Self

import msgspec

from harness.tokens.fitting import texts_of
from harness.tokens.matching import STRICT, ChainKey, NormalForm, chain_keys, next_key
from harness.types import Json, Message

_MOST_PREFIXES = 2_048  # of about 400 bytes, or entries without one; a history that is longer is kept all the same
_PER_MESSAGE = 100  # characters whose encoding takes as long as a template needs for a message, or a call in one
_DIGEST_BYTES = 16


class Prefix(NamedTuple):
    """The tools and the first messages of a conversation, as far as later calls ask."""

    key: ChainKey
    """What it is recognized by, in whatever spelling (`tokens.matching`)."""
    size: int = 0
    """The cost of rendering it, in characters."""
    told: int = 0
    """Characters of the texts that the model is told (`tokens.fitting`)."""
    said: int = 0
    """Characters of those that a template may leave out."""
    calls: int = 0
    """Tool calls in its messages."""
    opens_with_system: bool = False
    after_tools: bool = False
    """Some tool has answered."""

    @classmethod
    def of_tools(cls, tools: Sequence[Json]) -> Self:
        """That of a conversation before its first message."""
        encoded = msgspec.json.encode(tools) if tools else b""
        return cls(chain_keys((), tools)[0], len(encoded), len(encoded.decode()))

    def extend(self, message: Message, form: NormalForm, *, is_first: bool) -> "Prefix":
        """This one with `message` behind it."""
        told, said = (sum(map(len, texts)) for texts in texts_of([message], ()))
        calls = len(message.get("tool_calls") or ())
        return Prefix(
            next_key(self.key, message, form),
            self.size + _PER_MESSAGE * (1 + calls) + told + said,
            self.told + told,
            self.said + said,
            self.calls + calls,
            message["role"] in ("system", "developer") if is_first else self.opens_with_system,
            self.after_tools or message["role"] == "tool",
        )


class Recall(NamedTuple):
    """The part of a request that its session was sent before."""

    digests: Sequence[bytes] = ()
    """Of the raw bytes up to each raw message, dialect and tools first; none where nobody has looked at them."""
    prefixes: Sequence[Prefix] = ()
    """Those that are known: none, or those up to a message."""
    tools: tuple[Json, ...] | None = None
    """The tools, as they were read; None when they are new."""
    counts: Sequence[int] = ()
    """How many messages each raw one came to, of those that are known."""

    @property
    def known(self) -> int:
        """How many of the first messages were read before."""
        return max(0, len(self.prefixes) - 1)

    def with_read(self, counts: Sequence[int]) -> "Recall":
        """The same where each of the other raw messages has come to so many; one each where nobody says so."""
        return self._replace(counts=(*self.counts, *counts))


NOTHING_RECALLED = Recall()


class History:
    """The histories that one session was sent, keyed by what counts of a message (`form`)."""

    def __init__(self, form: NormalForm = STRICT) -> None:
        self._form = form
        self._prefixes: dict[bytes, tuple[Prefix, ...]] = {}
        self._held = 0
        self._tools: dict[bytes, tuple[Json, ...]] = {}
        self.body_bytes = 0
        """Of the last request that was read; as much of the next one is likely to be known."""

    def __len__(self) -> int:
        """How many prefixes it holds; an entry that has none counts as one."""
        return self._held

    def recall(self, dialect: str, tools: Sequence[msgspec.Raw], messages: Sequence[msgspec.Raw | bytes]) -> Recall:
        """What is known of a request in that dialect with these raw tools and messages."""
        digests = [sha256(b",".join((msgspec.json.encode(dialect), *tools))).digest()[:_DIGEST_BYTES]]
        for raw in messages:
            digests.append(sha256(digests[-1] + raw).digest()[:_DIGEST_BYTES])
        prefixes: list[Prefix] = []
        counts: list[int] = []
        for digest in digests:
            known = self._prefixes.get(digest)
            if known is None:
                break
            prefixes += known
            counts.append(len(known))
        return Recall(digests, prefixes, self._tools.get(digests[0]) if prefixes else None, counts[1:])

    def read(
        self, messages: Sequence[Message], tools: tuple[Json, ...], recall: Recall = NOTHING_RECALLED
    ) -> Sequence[Prefix]:
        """All prefixes of a conversation, of which `recall` knows the first ones; they are remembered.

        Element i covers the tools and the first i messages. Raises as the session's matching does.
        """
        prefixes = list(recall.prefixes) or [Prefix.of_tools(tools)]
        for number, message in enumerate(messages[recall.known :], start=recall.known):
            prefixes.append(prefixes[-1].extend(message, self._form, is_first=not number))
        if recall.digests:
            counts = [1, *recall.counts, *repeat(1, len(recall.digests) - 1 - len(recall.counts))]
            new = zip(recall.digests, counts, strict=True)
            if self._held + sum(_room(count) for digest, count in new if digest not in self._prefixes) > _MOST_PREFIXES:
                self._prefixes, self._held = {}, 0
            self._tools = {recall.digests[0]: tools}
            end = 0
            for digest, count in zip(recall.digests, counts, strict=True):
                start, end = end, end + count
                if digest not in self._prefixes:
                    self._prefixes[digest] = tuple(prefixes[start:end])
                    self._held += _room(count)
            assert end == len(prefixes), (end, len(prefixes))
        return prefixes


def _room(messages: int) -> int:
    """The room of a raw message's entry, which is one also where it came to no message."""
    return max(1, messages)

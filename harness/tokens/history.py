"""Histories that were read before, recognized by their bytes.

A client sends its whole conversation with each call. What the reading of a raw message came to, in some dialects to
several messages, is kept under a digest of its bytes and of everything before it, the dialect and the tools included;
the same bytes at the same place are not read again. Within a session equal bytes have an equal reading, so recognizing
one changes no result: a body that spells old messages in another way is read from there on, and comes to the same.

Where a dialect completes a message by what the session recorded, under the id of a call or the signature of a reply,
this holds for ids and signatures that were handed out: they leave the server with a reply that is recorded. Under one
that a client guesses before, nothing is found, and that reading stays.

A body usually begins with the bytes of the one before, up to the end of its last message. One digest tells so, which
is on the way to that of the whole body: then its messages are not digested one by one (`tokens.sent_body`).

An index of one session, and bounded in raw messages and in those that they came to: a client that sends other histories
all the time has them read each time. It keeps neither texts nor messages; of tools, those of the last request.
"""

from collections.abc import Sequence
from hashlib import sha256
from itertools import accumulate, repeat
from typing import NamedTuple, Self

import msgspec

from harness.tokens.fitting import texts_of
from harness.tokens.matching import EXACT, ChainKey, NormalForm, chain_keys, next_key
from harness.tokens.sent_body import SentBody
from harness.types import Json, Message

_MOST_PREFIXES = 2_048  # of about 400 bytes, or entries without one; a history that is longer is kept all the same
_PER_MESSAGE = 100  # characters whose encoding takes as long as a template needs for a message, or a call in one
_DIGEST_BYTES = 16


class Prefix(NamedTuple):
    """The tools and the first messages of a conversation, as far as later calls ask."""

    key: ChainKey
    """What it is recognized by, in whatever spelling (`tokens.matching`)."""
    exact: ChainKey
    """Digest of it to the letter; the key itself in an exact session."""
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
    def of_tools(cls, tools: Sequence[Json], variables: Json | None = None) -> Self:
        """That of a conversation before its first message, rendered with `variables` of the template."""
        encoded = msgspec.json.encode(tools) if tools else b""
        [key] = chain_keys((), [*tools, {"template_variables": variables}] if variables else tools)
        return cls(key, key, len(encoded), len(encoded.decode()))

    def extend(self, message: Message, form: NormalForm, *, is_first: bool) -> "Prefix":
        """This one with `message` behind it."""
        told, said = (sum(map(len, texts)) for texts in texts_of([message], ()))
        calls = len(message.get("tool_calls") or ())
        key = next_key(self.key, message, form)
        return Prefix(
            key,
            key if form.is_exact else next_key(self.exact, message),
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
    sent: SentBody | None = None
    """The body, where its raw messages are the elements of one array in it."""
    end: int = 0
    """Where the last of them ends in that, or something that is spelled like it behind."""

    @property
    def known(self) -> int:
        """How many of the first messages were read before."""
        return max(0, len(self.prefixes) - 1)

    @property
    def characters(self) -> int:
        """Those of the texts in the messages that are known."""
        return self.prefixes[-1].told + self.prefixes[-1].said if self.prefixes else 0

    def with_read(self, counts: Sequence[int]) -> "Recall":
        """The same where each of the other raw messages has come to so many; one each where nobody says so."""
        return self._replace(counts=(*self.counts, *counts))


NOTHING_RECALLED = Recall()


class _Beginning(NamedTuple):
    """The bytes of a body up to the end of its last message, and what the next one that begins with them recalls."""

    size_bytes: int
    digest: bytes
    recall: Recall


class History:
    """The histories that one session was sent, keyed by what counts of a message (`form`)."""

    def __init__(self, form: NormalForm = EXACT) -> None:
        self._form = form
        self._prefixes: dict[bytes, tuple[Prefix, ...]] = {}
        self._held = 0
        self._tools: dict[bytes, tuple[Json, ...]] = {}
        self._beginning: _Beginning | None = None
        self.body_bytes = 0
        """Of the last request that was read; as much of the next one is likely to be known."""

    def __len__(self) -> int:
        """How many prefixes it holds; an entry that has none counts as one."""
        return self._held

    def known_bytes(self, sent: SentBody) -> int:
        """How many bytes `sent` has in common with the body before, up to the end of its last message: all or none."""
        before = self._beginning
        is_known = before is not None and sent.begins_with(before.size_bytes, before.digest)
        return before.size_bytes if before is not None and is_known else 0

    def recall(
        self,
        dialect: str,
        tools: Sequence[msgspec.Raw],
        messages: Sequence[msgspec.Raw | bytes],
        sent: SentBody | None = None,
    ) -> Recall:
        """What is known of a request in that dialect with these raw tools and messages.

        `sent` is the body, for a dialect whose raw messages are the elements of one array in it, and nothing else.
        """
        head = sha256(b",".join((msgspec.json.encode(dialect), *tools))).digest()[:_DIGEST_BYTES]
        before = self._recall_beginning(head, messages, sent)
        digests, prefixes, counts = list(before.digests), list(before.prefixes), list(before.counts)
        for raw in messages[len(digests) - 1 :]:
            digests.append(sha256(digests[-1] + raw).digest()[:_DIGEST_BYTES])
        for digest in digests[1 + len(counts) :] if prefixes else ():
            known = self._prefixes.get(digest)
            if known is None:
                break
            prefixes += known
            counts.append(len(known))
        end = 0
        if sent is not None and messages and bytes(messages[-1]).endswith(b"}"):
            end = sent.content.rfind(messages[-1]) + len(messages[-1])
        return Recall(digests, prefixes, self._tools.get(head) if prefixes else None, counts, sent, end)

    def _recall_beginning(self, head: bytes, messages: Sequence[msgspec.Raw | bytes], sent: SentBody | None) -> Recall:
        """What is known of the messages that the body has in common with the one before; else of none of them.

        The array that was there up to the end of the last message is that of `messages`, unless the body names another
        one behind: into which they do not fit when they are longer than the rest of it.
        """
        before = self._beginning
        if sent is not None and before is not None and before.recall.digests[0] == head and self.known_bytes(sent):
            rest = len(sent.content) - before.size_bytes
            if len(messages) >= len(before.recall.digests) - 1 and sum(map(len, messages)) > rest:
                return before.recall
        return Recall((head,), self._prefixes.get(head, ()))

    def read(
        self,
        messages: Sequence[Message],
        tools: tuple[Json, ...],
        recall: Recall = NOTHING_RECALLED,
        variables: Json | None = None,
    ) -> Sequence[Prefix]:
        """All prefixes of a conversation, of which `recall` knows the first ones; they are remembered.

        `variables` are those of the template; a dialect that reads some recalls what was said with the same ones.

        Element i covers the tools and the first i messages. Raises as the session's matching does.
        """
        prefixes = list(recall.prefixes) or [Prefix.of_tools(tools, variables)]
        for number, message in enumerate(messages[recall.known :], start=recall.known):
            prefixes.append(prefixes[-1].extend(message, self._form, is_first=not number))
        if recall.digests:
            counts = [1, *recall.counts, *repeat(1, len(recall.digests) - 1 - len(recall.counts))]
            ends = list(accumulate(counts))
            assert ends[-1] == len(prefixes), (ends[-1], len(prefixes))
            new = [i for i, digest in enumerate(recall.digests) if digest not in self._prefixes]
            if self._held + sum(_room(counts[i]) for i in new) > _MOST_PREFIXES:
                self._prefixes, self._held, new = {}, 0, list(range(len(counts)))
            self._tools = {recall.digests[0]: tools}
            for i in new:
                self._prefixes[recall.digests[i]] = tuple(prefixes[ends[i] - counts[i] : ends[i]])
                self._held += _room(counts[i])
            self._beginning = None
            if recall.sent is not None and recall.end:
                digest = recall.sent.digest(recall.end)
                kept = Recall(recall.digests, prefixes, counts=counts[1:])
                self._beginning = _Beginning(recall.end, digest, kept)
        return prefixes


def _room(messages: int) -> int:
    """The room of a raw message's entry, which is one also where it came to no message."""
    return max(1, messages)

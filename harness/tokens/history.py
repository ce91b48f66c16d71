"""Index of the histories that a session has read, recognized by their bytes.

A client sends its whole conversation with each call. The messages read from a raw message are kept under a digest of
its bytes and everything before it. Within a session equal bytes have an equal reading, so this changes no result.

The index is bounded. It keeps neither texts nor messages, and tools of the last request only.
"""

from bisect import bisect_left
from collections.abc import Sequence
from hashlib import sha256
from itertools import accumulate, repeat
from typing import NamedTuple, Self

import msgspec

from harness.tokens.fitting import texts_of
from harness.tokens.matching import EXACT, ChainKey, NormalForm, chain_keys, next_key
from harness.tokens.sent_body import SentBody
from harness.types import Json, Message, Paced

_MOST_PREFIXES = 2_048  # of about 400 bytes; beyond, all is forgotten but the history at hand, which is kept whole
_PER_MESSAGE = 100  # characters that encode in the time a template needs for a message or a call
_DIGEST_BYTES = 16


class Prefix(msgspec.Struct, frozen=True, gc=False):
    key: ChainKey
    """Digest, equal for all spellings (`tokens.matching`)."""
    exact: ChainKey
    """Digest to the letter."""
    size: int = 0
    """Rendering cost in characters."""
    told: int = 0
    """Characters that a template must keep (`tokens.fitting`)."""
    said: int = 0
    """Characters that a template may omit."""
    calls: int = 0
    opens_with_system: bool = False
    after_tools: bool = False

    @classmethod
    def of_tools(cls, tools: Sequence[Json], variables: Json | None = None) -> Self:
        encoded = msgspec.json.encode(tools) if tools else b""
        [key] = chain_keys((), [*tools, {"template_variables": variables}] if variables else tools)
        return cls(key, key, len(encoded), len(encoded.decode()))

    def extend(self, message: Message, form: NormalForm, *, is_first: bool) -> "Prefix":
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
    """Part of a request that its session has read before."""

    digests: Sequence[bytes] = ()
    """Digests up to each raw message, dialect and tools first. Empty if not computed."""
    prefixes: Sequence[Prefix] = ()
    """Known prefixes: none, or all up to a message."""
    tools: tuple[Json, ...] | None = None
    counts: Sequence[int] = ()
    """Messages read from each known raw message."""
    sent: SentBody | None = None
    elements: slice | None = None
    """Bytes of `sent` from the first raw message to the last, if known."""

    @property
    def known(self) -> int:
        return max(0, len(self.prefixes) - 1)

    @property
    def characters(self) -> int:
        return self.prefixes[-1].told + self.prefixes[-1].said if self.prefixes else 0

    def with_read(self, counts: Sequence[int]) -> "Recall":
        """Append the messages read from further raw messages."""
        return self._replace(counts=(*self.counts, *counts))


NOTHING_RECALLED = Recall()


class Beginning(NamedTuple):
    """A body up to its last message."""

    elements: slice
    digest: bytes
    recall: Recall


class History:
    def __init__(self, form: NormalForm = EXACT) -> None:
        self._form = form
        self._prefixes: dict[bytes, tuple[Prefix, ...]] = {}
        self._held = 0
        self._tools: dict[bytes, tuple[Json, ...]] = {}
        self._beginning: Beginning | None = None
        self.body_bytes = 0

    def __len__(self) -> int:
        return self._held

    def beginning(self, sent: SentBody) -> Beginning | None:
        """Return the beginning that `sent` shares with the body before: all up to its last message."""
        before = self._beginning
        return before if before is not None and sent.begins_with(before.elements.stop, before.digest) else None

    def known_bytes(self, sent: SentBody) -> int:
        before = self.beginning(sent)
        return 0 if before is None else int(before.elements.stop)

    def recall(
        self,
        dialect: str,
        tools: Sequence[msgspec.Raw],
        messages: Sequence[msgspec.Raw | bytes],
        begins: Beginning | None = None,
    ) -> Recall:
        """Return the known part of a request. `begins`: the known elements at the start of its array of messages."""
        head = sha256(b",".join((msgspec.json.encode(dialect), *tools))).digest()[:_DIGEST_BYTES]
        # The shared digest of a beginning tells that its messages are known, without digesting them one by one.
        before = begins.recall if begins is not None else NOTHING_RECALLED
        if not before.digests or before.digests[0] != head:
            before = Recall((head,), self._prefixes.get(head, ()))
        digests, prefixes, counts = list(before.digests), list(before.prefixes), list(before.counts)
        for raw in messages[len(digests) - 1 :]:
            digests.append(sha256(digests[-1] + raw).digest()[:_DIGEST_BYTES])
        for digest in digests[1 + len(counts) :] if prefixes else ():
            known = self._prefixes.get(digest)
            if known is None:
                break
            prefixes += known
            counts.append(len(known))
        return Recall(digests, prefixes, self._tools.get(head) if prefixes else None, counts)

    def read(
        self,
        messages: Sequence[Message],
        tools: tuple[Json, ...],
        recall: Recall = NOTHING_RECALLED,
        variables: Json | None = None,
        paced: Paced = iter,
    ) -> Sequence[Prefix]:
        """Return all prefixes of a conversation, and remember them.

        Element i covers the tools and the first i messages. Template `variables` are part of element 0: a dialect with
        variables recalls only what came with the same ones. Raises as the session's matching does.
        """
        prefixes = list(recall.prefixes) or [Prefix.of_tools(tools, variables)]
        for number, message in enumerate(paced(messages[recall.known :]), start=recall.known):
            prefixes.append(prefixes[-1].extend(message, self._form, is_first=not number))
        if recall.digests:
            counts = [1, *recall.counts, *repeat(1, len(recall.digests) - 1 - len(recall.counts))]
            ends = list(accumulate(counts))
            assert ends[-1] == len(prefixes), (ends[-1], len(prefixes))
            # Some dialects complete a message from the session's record, by a call's id or a reply's signature. Keeping
            # the reading is safe: these leave the server with a recorded reply. One that a client guesses before finds
            # nothing, and that reading stays.
            known = bisect_left(ends, len(recall.prefixes))
            new = [i for i in range(known, len(counts)) if recall.digests[i] not in self._prefixes]
            if self._held + sum(_room(counts[i]) for i in new) > _MOST_PREFIXES:
                self._prefixes, self._held, new = {}, 0, list(range(len(counts)))
            self._tools = {recall.digests[0]: tools}
            for i in new:
                self._prefixes[recall.digests[i]] = tuple(prefixes[ends[i] - counts[i] : ends[i]])
                self._held += _room(counts[i])
            self._beginning = None
            if recall.sent is not None and recall.elements is not None:
                digest = recall.sent.digest(recall.elements.stop)
                kept = Recall(recall.digests, prefixes, counts=counts[1:])
                self._beginning = Beginning(recall.elements, digest, kept)
        return prefixes


def _room(messages: int) -> int:
    return max(1, messages)  # the entry of a raw message without messages takes room, too

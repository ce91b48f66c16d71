"""Decides which tokens the next step computes and which KV stays. Pure: no tensors.

Each step gives every decoding sequence one token; sequences with uncomputed prompts share the rest of `step_tokens`,
oldest first. KV capacity is budgeted in tokens. When it runs out, cached prefixes are evicted, least recently used
first, then the youngest running sequence returns to the queue. So the oldest always advances. The KV of a finished
sequence stays as a cached prefix; a new sequence starts from the longest prefix it shares.

Call `take_kv_ops` after every change, before computing a plan.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from harness.types import TokenIds

_GRANULARITY = 64  # tokens; capacities are multiples, so that short sequences do not grow every step
_GROWTH = 1.25  # keeps the total cost of growing linear and the slack below a quarter
_WORTH_WAITING_FOR = 32  # tokens of shared prefix; below that, computing it again is cheaper than a delay


class BatchLimits(NamedTuple):
    sequences: int
    step_tokens: int
    kv_tokens: int
    """KV capacity in tokens, cached prefixes included."""
    shares_prefixes: bool = True
    """True to start from other sessions' prefixes too."""


class KvDrop(NamedTuple):
    kv: int


class KvCopy(NamedTuple):
    """Creates `target` with room for `capacity` tokens, the first `tokens` copied from `source`."""

    source: int
    target: int
    tokens: int
    capacity: int


KvOp = KvDrop | KvCopy


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens whose KV is wanted: `ids[:length]` are known, `computed` of them have KV."""

    ids: TokenIds
    """Buffer with room for the whole output."""
    length: int
    logits_from: int
    """First position whose logits are wanted; earlier tokens may come from a cached prefix."""
    session_id: str | None = None
    computed: int = 0
    kv: int | None = None
    """Name of its KV; None while waiting."""
    capacity: int = 0
    """Tokens that its KV can hold."""
    cached_tokens: int | None = None
    """Tokens reused when it first started."""
    rows_from: int | None = None
    """First position whose experts are wanted and not recorded; None for none."""

    def append(self, token_id: int) -> None:
        self.ids[self.length] = token_id
        self.logits_from = self.length
        self.length += 1

    @property
    def reusable(self) -> int:
        """Leading tokens that may come from a cached prefix."""
        return self.logits_from if self.rows_from is None else min(self.logits_from, self.rows_from)

    @property
    def known_ids(self) -> TokenIds:
        """Input and output so far."""
        return self.ids[: self.length]

    @property
    def missing(self) -> int:
        """Known tokens without KV."""
        return self.length - self.computed


class StepPiece(NamedTuple):
    """Tokens `start..stop` (end exclusive) of `sequence` to compute in this step."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def wanted(self) -> range:
        return range(max(self.start, min(self.sequence.logits_from, self.stop)), self.stop)


@dataclass(slots=True, eq=False)
class _Prefix:
    ids: TokenIds
    session_id: str | None
    kv: int
    capacity: int


class _Match(NamedTuple):
    source: Sequence | _Prefix | None
    tokens: int


@dataclass(slots=True)
class Scheduler:
    limits: BatchLimits
    running: list[Sequence] = field(default_factory=list)
    """Oldest first."""
    waiting: deque[Sequence] = field(default_factory=deque)
    _prefixes: OrderedDict[int, _Prefix] = field(default_factory=OrderedDict)
    """By KV name, least recently used first."""
    _kv_ops: list[KvOp] = field(default_factory=list)
    _next_kv: int = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def used_tokens(self) -> int:
        """KV capacity in use; at most `limits.kv_tokens`."""
        holders: Iterable[Sequence | _Prefix] = chain(self.running, self._prefixes.values())
        return sum(holder.capacity for holder in holders)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def plan(self) -> list[StepPiece]:
        """Start waiting sequences and choose what to compute; never empty while there is work."""
        self._start_waiting()
        decoding = sum(sequence.missing == 1 for sequence in self.running)
        left = max(self.limits.step_tokens - decoding, 1)
        chunks = []
        for sequence in self.running:
            tokens = 1 if sequence.missing == 1 else min(sequence.missing, left)
            left -= tokens if sequence.missing > 1 else 0
            if tokens:
                chunks.append((sequence, tokens))
        for sequence, tokens in chunks:
            if sequence.kv is not None:  # an older one may have sent it back to waiting
                self._reserve(sequence, sequence.computed + tokens)
        return [StepPiece(seq, seq.computed, seq.computed + tokens) for seq, tokens in chunks if seq.kv is not None]

    def complete(self, pieces: Iterable[StepPiece]) -> None:
        for piece in pieces:
            piece.sequence.computed = piece.stop

    def finish(self, sequence: Sequence) -> None:
        """Remove `sequence`; its KV stays as a cached prefix and replaces those it extends."""
        if sequence.kv is None:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        if not sequence.computed:
            self._kv_ops.append(KvDrop(sequence.kv))
            return
        ids = sequence.ids[: sequence.computed].copy()
        for prefix in list(self._prefixes.values()):
            extends = prefix.session_id == sequence.session_id and common_prefix(prefix.ids, ids) == prefix.ids.size
            if extends:
                self._evict(prefix)
        self._prefixes[sequence.kv] = _Prefix(ids, sequence.session_id, sequence.kv, sequence.capacity)
        sequence.kv, sequence.capacity = None, 0

    def forget_kv(self) -> None:
        """Invalidate all KV after a weight change; running sequences recompute theirs."""
        while self._prefixes:
            self._evict(next(iter(self._prefixes.values())))
        for sequence in self.running:
            sequence.computed = 0

    def take_kv_ops(self) -> list[KvOp]:
        """Return and clear the pending operations on the KV storage."""
        taken, self._kv_ops = self._kv_ops, []
        return taken

    def _start_waiting(self) -> None:
        for sequence in list(self.waiting):
            if len(self.running) >= self.limits.sequences:
                return
            match = self._best_match(sequence)
            # Wait for a running one that is about to compute a longer prefix: samples of one prompt compute it once.
            if self._is_being_computed(sequence, match.tokens):
                continue
            if not self._start(sequence, match):
                return

    def _best_match(self, sequence: Sequence) -> _Match:
        sources: Iterable[tuple[Sequence | _Prefix, TokenIds]] = chain(
            ((prefix, prefix.ids) for prefix in reversed(self._prefixes.values())),
            ((other, other.ids[: other.computed]) for other in self.running),
        )
        best = _Match(None, 0)
        for source, ids in sources:
            if not self.limits.shares_prefixes and source.session_id != sequence.session_id:
                continue
            tokens = min(common_prefix(sequence.known_ids, ids), sequence.reusable)
            if tokens > best.tokens:
                best = _Match(source, tokens)
        return best

    def _is_being_computed(self, sequence: Sequence, available: int) -> bool:
        return self.limits.shares_prefixes and any(
            min(common_prefix(sequence.known_ids, other.known_ids), sequence.reusable)
            >= max(available, other.computed) + _WORTH_WAITING_FOR
            for other in self.running
            if other.missing > 1
        )

    def _start(self, sequence: Sequence, match: _Match) -> bool:
        """Run `sequence` with KV; return False, with nothing changed, if there is no room."""
        capacity = self._capacity_for(sequence, 0)
        room = self.limits.kv_tokens - sum(other.capacity for other in self.running)
        if capacity > room:
            return False
        match match.source:
            case _Prefix() as prefix if prefix.session_id == sequence.session_id and match.tokens == prefix.ids.size:
                self._take_over(prefix, sequence)  # its session continues here
            case _Prefix() as prefix if prefix.capacity + capacity > room:
                if match.tokens < prefix.capacity // 2:
                    # Taken over, it would take the room of the sequences after this one for a few tokens' sake.
                    self._evict(prefix)
                    return self._start(sequence, self._best_match(sequence))
                self._take_over(prefix, sequence)
            case source:
                self._make_room(capacity, keep=source)
                self._next_kv += 1
                sequence.kv, sequence.capacity = self._next_kv, capacity
                if isinstance(source, _Prefix):
                    self._prefixes.move_to_end(source.kv)
                if source is not None:
                    assert source.kv is not None
                    self._kv_ops.append(KvCopy(source.kv, sequence.kv, match.tokens, capacity))
        sequence.computed = match.tokens
        if sequence.cached_tokens is None:
            sequence.cached_tokens = match.tokens
        self.waiting.remove(sequence)
        self.running.append(sequence)
        return True

    def _take_over(self, prefix: _Prefix, sequence: Sequence) -> None:
        del self._prefixes[prefix.kv]
        sequence.kv, sequence.capacity = prefix.kv, prefix.capacity

    def _reserve(self, sequence: Sequence, tokens: int) -> None:
        if tokens <= sequence.capacity:
            return
        capacity = self._capacity_for(sequence, tokens)
        while sequence.kv is not None and self._excess(capacity - sequence.capacity) > 0:
            if self._prefixes:
                self._evict(next(iter(self._prefixes.values())))
                continue
            # Possibly `sequence` itself.
            youngest = self.running.pop()
            assert youngest.kv is not None
            self._kv_ops.append(KvDrop(youngest.kv))
            youngest.kv, youngest.capacity, youngest.computed = None, 0, 0
            self.waiting.appendleft(youngest)
        if sequence.kv is not None:
            sequence.capacity = capacity

    def _capacity_for(self, sequence: Sequence, tokens: int) -> int:
        needed = max(sequence.length + 1, tokens)
        wanted = max(needed, int(sequence.capacity * _GROWTH))
        return min(-(-wanted // _GRANULARITY) * _GRANULARITY, self.limits.kv_tokens)

    def _excess(self, added: int) -> int:
        return self.used_tokens + added - self.limits.kv_tokens

    def _make_room(self, capacity: int, *, keep: Sequence | _Prefix | None) -> None:
        for prefix in list(self._prefixes.values()):
            if self._excess(capacity) <= 0:
                return
            if prefix is not keep:
                self._evict(prefix)

    def _evict(self, prefix: _Prefix) -> None:
        del self._prefixes[prefix.kv]
        self._kv_ops.append(KvDrop(prefix.kv))


def common_prefix(left: TokenIds, right: TokenIds) -> int:
    """Return the number of equal leading ids."""
    shared = min(left.size, right.size)
    differs = left[:shared] != right[:shared]
    first = int(differs.argmax()) if shared else 0
    return first if shared and differs[first] else shared

"""Bin packing of a complete list of segments. A plan depends only on lengths and their order.

Best fit decreasing: place the longest segment first, each into the pack that it leaves the least room in.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt

from harness.errors import SegmentError

FILL_UP_TO = 16_384
"""Most segments for a second packing."""

_CANDIDATES = 32  # segments tried with the longest one; four times as many gain nothing and cost seconds
_WORD = 512  # bits: lengths scanned at once

_Lengths = npt.NDArray[np.int64]


def plan_packs(lengths: Sequence[int] | npt.NDArray[np.integer], packing_length: int) -> list[list[int]]:
    """Assign every segment to a pack of at most `packing_length` tokens.

    Return ascending segment indices per pack, packs sorted by their first one. Raises `SegmentError` when a segment is
    empty or longer than a pack.
    """
    sizes = _check_lengths(lengths, packing_length)
    if not sizes.size:
        return []
    longest_first = np.argsort(-sizes, kind="stable")
    descending = sizes[longest_first]
    packs = _fit_best(descending, packing_length)
    # Best fit needs at most about 11/9 of the fewest packs, and some lengths reach that. More than 1 % above the bound,
    # pack again by minimum bin slack (Gupta and Ho 1999; with a fixed first segment: Fleszar and Hindi 2002), and use
    # the plan with fewer packs.
    if sizes.size <= FILL_UP_TO and 100 * len(packs) > 101 * fewest_packs(sizes, packing_length):
        packs = min(packs, _fill_best(descending, packing_length), key=len)
    pack_of = np.empty(sizes.size, dtype=np.int64)
    places = np.fromiter(chain.from_iterable(packs), np.int64, sizes.size)
    pack_of[longest_first[places]] = np.repeat(np.arange(len(packs)), [len(pack) for pack in packs])
    return _in_order(pack_of)


def fewest_packs(lengths: Sequence[int] | npt.NDArray[np.integer], packing_length: int) -> int:
    """Return a lower bound for the number of packs: L2 of Martello and Toth (1990). Raises like `plan_packs`."""
    sizes = np.sort(_check_lengths(lengths, packing_length))
    if not sizes.size:
        return 0
    # Segments above half a pack never share one. For each size up to half a pack: what does not fit with a segment
    # that nearly fills a pack needs packs of its own. Size 0 gives the plain sum of lengths.
    total = np.concatenate([[0], np.cumsum(sizes)])
    half = int(np.searchsorted(sizes, packing_length // 2, side="right"))  # from here on: more than half a pack
    least = np.concatenate([[0], np.unique(sizes[:half])])
    small = np.searchsorted(sizes, least, side="left")
    large = np.searchsorted(sizes, packing_length - least, side="right")  # from here on: no room for `least`
    beside = (large - half) * packing_length - (total[large] - total[half])
    more = np.maximum(0, -((beside - (total[half] - total[small])) // packing_length))
    return int((sizes.size - half + more).max())


def fill_room(lengths: Sequence[int], room: int) -> list[int]:
    """Return ascending indices of `lengths` that fill `room` as far as possible, from the shortest prefix."""
    mask = (2 << room) - 1
    sums = [1]  # bit s of sums[k]: some of the first k lengths add up to s
    for length in lengths:
        if sums[-1] >> room:
            break
        sums.append((sums[-1] | sums[-1] << length) & mask if length <= room else sums[-1])
    left = sums[-1].bit_length() - 1
    chosen = []
    while left:
        last = bisect_left(sums, 1, key=lambda reached: reached >> left & 1) - 1
        chosen.append(last)
        left -= lengths[last]
    return chosen[::-1]


def _fit_best(sizes: _Lengths, packing_length: int) -> list[list[int]]:
    packs: list[list[int]] = []
    # Packs are indexed by the room left and equal segments are placed together: a million segments take seconds and
    # linear memory.
    rooms = _Rooms(packing_length)
    distinct, starts = np.unique(-sizes, return_index=True)
    ends = [*starts[1:].tolist(), sizes.size]
    for size, start, end in zip((-distinct).tolist(), starts.tolist(), ends, strict=True):
        place = start
        while place < end:
            room = rooms.tightest(size)
            if room is None:
                room, each = packing_length, packing_length // size
                into = list(range(len(packs), len(packs) + -(-(end - place) // each)))
                packs.extend([] for _ in into)
            else:
                # A pack that takes one of them leaves less room than all others, so it takes the next one as well.
                each = room // size
                into = rooms.take(room, -(-(end - place) // each))
            for pack in into:
                packs[pack].extend(range(place, min(place + each, end)))
                place += each
            if place <= end:
                rooms.put(room - each * size, into)
            else:
                rooms.put(room - each * size, into[:-1])
                rooms.put(room - (each - place + end) * size, into[-1:])
    return packs


def _fill_best(sizes: _Lengths, packing_length: int) -> list[list[int]]:
    distinct, starts = np.unique(-sizes, return_index=True)
    distinct = -distinct
    ends = np.append(starts[1:], sizes.size)
    packs = []
    while distinct.size:
        pack = [int(starts[0])]
        starts[0] += 1
        room = packing_length - int(distinct[0])
        fitting = slice(np.searchsorted(-distinct, -room), None)
        candidates = np.repeat(
            np.arange(distinct.size)[fitting], np.minimum(ends[fitting] - starts[fitting], room // distinct[fitting])
        )
        if candidates.size > _CANDIDATES:
            candidates = candidates[np.linspace(0, candidates.size - 1, _CANDIDATES).astype(np.int64)]
        for chosen in candidates[fill_room(distinct[candidates].tolist(), room)].tolist():
            pack.append(int(starts[chosen]))
            starts[chosen] += 1
        packs.append(pack)
        is_left = starts < ends
        if not is_left.all():
            distinct, starts, ends = distinct[is_left], starts[is_left], ends[is_left]
    return packs


def _in_order(pack_of: npt.NDArray[np.int64]) -> list[list[int]]:
    _, firsts, packs = np.unique(pack_of, return_index=True, return_inverse=True)
    rank = np.empty(firsts.size, dtype=np.int64)
    rank[np.argsort(firsts)] = np.arange(firsts.size)
    order = np.argsort(rank[packs], kind="stable").tolist()
    borders = np.cumsum(np.bincount(rank[packs], minlength=firsts.size)).tolist()
    return [order[start:end] for start, end in pairwise([0, *borders])]


class _Rooms:
    """Packs by room left, found by two bit scans."""

    def __init__(self, packing_length: int) -> None:
        self._packs: dict[int, list[int]] = {}
        self._words = [0] * (packing_length // _WORD + 1)
        self._used = 0  # bit w: word w has a bit

    def tightest(self, size: int) -> int | None:
        word, bit = divmod(size, _WORD)
        bits = self._words[word] >> bit << bit
        if not bits:
            later = self._used >> word + 1 << word + 1
            if not later:
                return None
            word = (later & -later).bit_length() - 1
            bits = self._words[word]
        return word * _WORD + (bits & -bits).bit_length() - 1

    def put(self, room: int, packs: list[int]) -> None:
        if room and packs:
            if room in self._packs:
                self._packs[room].extend(packs)
            else:
                self._packs[room] = packs
                self._words[room // _WORD] |= 1 << room % _WORD
                self._used |= 1 << room // _WORD

    def take(self, room: int, most: int) -> list[int]:
        """Remove at most `most` packs with `room` left, the latest first."""
        packs = self._packs[room]
        if len(packs) > most:
            taken = packs[-most:]
            del packs[-most:]
            return taken
        del self._packs[room]
        word = room // _WORD
        self._words[word] ^= 1 << room % _WORD
        if not self._words[word]:
            self._used ^= 1 << word
        return packs


def _check_lengths(lengths: Sequence[int] | npt.NDArray[np.integer], packing_length: int) -> _Lengths:
    sizes = np.asarray(lengths, dtype=np.int64)
    if packing_length < 1:
        raise SegmentError(f"packing_length: expected at least 1, got {packing_length}")
    if sizes.size and sizes.min() < 1:
        raise SegmentError(f"expected at least one token in a segment, number {int(sizes.argmin())} has {sizes.min()}")
    if sizes.size and sizes.max() > packing_length:
        at = int(sizes.argmax())
        raise SegmentError(f"segment {at} has {sizes[at]} tokens; packing_length is {packing_length}")
    return sizes

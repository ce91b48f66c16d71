"""A stream of packs: nothing is lost, nobody is left behind, and what waits is bounded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import SegmentError
from harness.samples.packing import plan_packs
from harness.samples.packs import Pack, PackStream
from harness.samples.segments import COLUMNS
from tests.unit.samples.some_segments import lengths_up_to, segment, segments_of

PACKING_LENGTH = 60
STREAMS = (lengths_up_to(PACKING_LENGTH), st.integers(0, 8))


def fits_in_order(lengths: list[int]) -> int:
    """How many of `lengths` fit into one pack in this order."""
    tokens = 0
    for place, length in enumerate(lengths):
        tokens += length
        if tokens > PACKING_LENGTH:
            return place
    return len(lengths)


@given(*STREAMS)
def test_every_segment_leaves_whole_in_one_pack(lengths: list[int], lookahead: int):
    """Under its number, with every value that it came with."""
    segments = segments_of(lengths)
    stream = PackStream(PACKING_LENGTH, lookahead)
    packs = [pack for each in segments if (pack := stream.add(each))] + [*stream.finish()]
    assert sorted(int(number) for pack in packs for number in pack.numbers) == list(range(len(segments)))
    assert stream.waiting == 0
    for pack in packs:
        assert len(pack) <= PACKING_LENGTH
        for number, each in zip(pack.numbers, pack.segments(), strict=True):
            for name in COLUMNS:
                assert getattr(each, name).tobytes() == getattr(segments[number], name).tobytes()


@given(*STREAMS)
def test_a_pack_takes_the_oldest_and_is_at_least_as_full_as_in_order(lengths: list[int], lookahead: int):
    """It comes as soon as `lookahead` segments wait behind those that fill it, so no more than that ever waits."""
    stream = PackStream(PACKING_LENGTH, lookahead)
    waiting: list[int] = []
    for number, each in enumerate(segments_of(lengths)):
        waiting.append(number)
        due = fits_in_order([lengths[waits] for waits in waiting])
        pack = stream.add(each)
        assert (pack is not None) == (len(waiting) - due >= max(lookahead, 1))
        if pack is not None:
            check_pack(pack, waiting, lengths, lookahead)
        assert stream.waiting == len(waiting)
    for pack in stream.finish():
        check_pack(pack, waiting, lengths, lookahead)
    assert not waiting


def check_pack(pack: Pack, waiting: list[int], lengths: list[int], lookahead: int) -> None:
    """Judge `pack` by those that waited, and take its segments from them."""
    due = fits_in_order([lengths[waits] for waits in waiting])
    numbers = pack.numbers.tolist()
    assert numbers == sorted(numbers)
    assert numbers[0] == waiting[0]
    assert set(numbers) <= set(waiting[: due + lookahead])
    assert len(set(waiting[:due]) - set(numbers)) <= lookahead
    assert len(pack) >= sum(lengths[waits] for waits in waiting[:due])
    waiting[:] = [waits for waits in waiting if waits not in set(numbers)]


@given(*STREAMS)
def test_the_same_segments_give_the_same_packs(lengths: list[int], lookahead: int):
    """Digest for digest; also in a stream that was used before."""
    segments = segments_of(lengths)
    used = PackStream(PACKING_LENGTH, lookahead)
    used.add(segment(3))
    assert [len(pack) for pack in used.finish()] == [3]
    streams = [PackStream(PACKING_LENGTH, lookahead), used]
    packs = [[pack for each in segments if (pack := stream.add(each))] + [*stream.finish()] for stream in streams]
    assert [pack.digest() for pack in packs[0]] == [pack.digest() for pack in packs[1]]


def test_many_small_segments_fill_a_pack():
    """The look-ahead comes on top of what fills a pack: packs of segments far smaller than themselves are full."""
    stream = PackStream(1000, lookahead=4)
    packs = [pack for each in segments_of([2] * 2000) if (pack := stream.add(each))]
    assert [len(pack) for pack in packs] == [1000] * 3
    assert len(plan_packs([2] * 2000, 1000)) == len([*packs, *stream.finish()]) == 4


def test_what_no_stream_packs_is_refused():
    """A segment that is too long changes nothing, also not the numbers of the next ones."""
    stream = PackStream(10, lookahead=0, position_rows=4)
    stream.add(segment(6))
    with pytest.raises(SegmentError, match="segment 1 has 11 tokens; packing_length is 10"):
        stream.add(segment(11))
    pack = stream.add(segment(5))
    assert pack is not None
    assert (pack.numbers.tolist(), pack.position_ids.shape) == ([0], (4, 6))
    assert [each.numbers.tolist() for each in stream.finish()] == [[1]]
    for arguments in ((0, 1), (10, -1)):
        with pytest.raises(SegmentError, match="expected packing_length >= 1 and lookahead >= 0"):
            PackStream(*arguments)

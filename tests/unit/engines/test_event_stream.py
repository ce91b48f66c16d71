"""Events come out whole and in order, however the network cuts the bytes."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from harness.engines.remote.http_bodies import EventBuffer

STREAM = b': hello\nevent: x\ndata: {"a":1}\r\n\r\ndata:{"b":2}\n\nretry: 3\ndata: [DONE]\n\ndata: {"late":1}\n\n'


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_cuts_do_not_matter(cuts: list[int]):
    """Payloads are the same for every way to cut the stream, and end at the marker."""
    buffer = EventBuffer()
    edges = [0, *sorted(cuts), len(STREAM)]
    payloads = [p for a, b in pairwise(edges) for p in buffer.feed(STREAM[a:b])]

    assert payloads == [b'{"a":1}', b'{"b":2}']
    assert buffer.is_done


def test_an_event_may_be_larger_than_any_network_buffer():
    """A cumulative chunk of megabytes arrives in pieces of kilobytes."""
    event = b"data: " + b"x" * (4 << 20) + b"\n"
    buffer = EventBuffer()
    payloads = [p for start in range(0, len(event), 1 << 16) for p in buffer.feed(event[start : start + (1 << 16)])]

    assert [len(payload) for payload in payloads] == [4 << 20]
    assert not buffer.is_done

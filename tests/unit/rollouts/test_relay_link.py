"""Bytes of a relay's streams arrive once and in order, or their stream breaks, whatever connections are cut where."""

import struct
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from harness.rollouts.relay.link import (
    ACK,
    DATA,
    END,
    GONE,
    PING,
    RESET,
    STREAMS,
    WINDOW_BYTES,
    Link,
    LinkStream,
    MalformedFrame,
)
from tests.thoroughness import examples

SIDES = st.sampled_from(("inside", "outside"))
INSIDE, OUTSIDE = "inside", "outside"


@dataclass
class Seen:
    """One stream, as its two users see it."""

    ends: dict[str, LinkStream]
    written: dict[str, bytearray] = field(default_factory=lambda: {INSIDE: bytearray(), OUTSIDE: bytearray()})
    read: dict[str, bytearray] = field(default_factory=lambda: {INSIDE: bytearray(), OUTSIDE: bytearray()})
    saw_end: set[str] = field(default_factory=set)
    was_reset: bool = False


def other(side: str) -> str:
    """The opposite side."""
    return OUTSIDE if side == INSIDE else INSIDE


class Relayed(RuleBasedStateMachine):
    """Two links, and a connection between them that breaks."""

    streams = Bundle("streams")

    @initialize()
    def begin(self) -> None:
        self.accepted: dict[int, LinkStream] = {}
        self.links = {INSIDE: Link(), OUTSIDE: Link(lambda stream: self.accepted.update({stream.number: stream}))}
        self.on_the_way = {INSIDE: b"", OUTSIDE: b""}
        self.seen: list[Seen] = []

    def deliver(self, side: str, size: int) -> None:
        self.on_the_way[side] += b"".join(iter(self.links[side].output, b""))
        data, self.on_the_way[side] = self.on_the_way[side][:size], self.on_the_way[side][size:]
        self.links[other(side)].receive(data)
        for seen in self.seen:
            number = seen.ends[INSIDE].number
            if number in self.accepted:
                seen.ends.setdefault(OUTSIDE, self.accepted[number])

    @rule(target=streams, data=st.binary(min_size=1, max_size=40))
    def open(self, data: bytes) -> Seen:
        seen = Seen({INSIDE: LinkStream(self.links[INSIDE])})
        self.seen.append(seen)
        self.write(seen, INSIDE, data, 1)
        return seen

    @rule(seen=streams, side=SIDES, data=st.binary(min_size=1, max_size=40), times=st.sampled_from((1, 1, 1000)))
    def write(self, seen: Seen, side: str, data: bytes, times: int) -> None:
        stream = seen.ends.get(side)
        if stream is None or stream.is_broken or stream.has_ended:
            return
        data = (data * times)[: stream.room_bytes]
        stream.write(data)
        seen.written[side] += data

    @rule(seen=streams, side=SIDES)
    def end(self, seen: Seen, side: str) -> None:
        if side in seen.ends and not seen.ends[side].is_broken:
            seen.ends[side].end()

    @rule(seen=streams, side=SIDES)
    def reset(self, seen: Seen, side: str) -> None:
        if side in seen.ends and not seen.ends[side].is_complete:
            seen.ends[side].reset()
            seen.was_reset = True

    @rule(seen=streams, side=SIDES, is_done=st.booleans())
    def take(self, seen: Seen, side: str, is_done: bool) -> None:
        stream = seen.ends.get(side)
        if stream is None or stream.is_broken:
            return
        if is_done:
            stream.acknowledge()
        if stream.has_news:
            data = stream.take()
            seen.read[side] += data
            if not data:
                stream.acknowledge(the_end=True)
                seen.saw_end.add(side)

    @rule(side=SIDES, size=st.integers(1, 200))
    def carry(self, side: str, size: int) -> None:
        self.deliver(side, size)

    @rule(inside=st.integers(0, 100), outside=st.integers(0, 100))
    def cut(self, inside: int, outside: int) -> None:
        """Some bytes of what is on its way still arrive, and the rest never does."""
        self.deliver(INSIDE, inside)
        self.deliver(OUTSIDE, outside)
        self.on_the_way = {INSIDE: b"", OUTSIDE: b""}
        for link in self.links.values():
            link.restart()

    @invariant()
    def nothing_comes_twice_or_out_of_order(self) -> None:
        for seen in self.seen:
            for side in (INSIDE, OUTSIDE):
                assert bytes(seen.written[other(side)]).startswith(bytes(seen.read[side]))
                if side in seen.saw_end:
                    assert seen.read[side] == seen.written[other(side)]
            assert seen.was_reset or not any(stream.is_broken for stream in seen.ends.values())

    def teardown(self) -> None:
        if not hasattr(self, "seen"):
            return
        self.cut(0, 0)
        for _ in range(20):
            for side in (INSIDE, OUTSIDE):
                self.deliver(side, 1 << 20)
                for seen in self.seen:
                    self.take(seen, side, is_done=True)
                    self.end(seen, side)
        self.nothing_comes_twice_or_out_of_order()
        for seen in self.seen:
            assert seen.was_reset or seen.saw_end == {INSIDE, OUTSIDE}
        assert not any(link._streams or link._marked or link._gone for link in self.links.values())


TestRelayed = Relayed.TestCase
TestRelayed.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)


def frame(kind: int, number: int = 0, offset: int = 0, data: bytes = b"", size: int | None = None) -> bytes:
    """Bytes of a frame."""
    return struct.pack("!BIQI", kind, number, offset, len(data) if size is None else size) + data


MALFORMED = {
    "a kind that is none": frame(PING + 1),
    "data of a gigabyte": frame(DATA, 1, 0, b"x", 1 << 30),
    "an ACK with data": frame(DATA, 1, 0, b"x") + frame(ACK, 1, 0, b"x"),
    "a PING with data": frame(PING, data=b"x"),
    "stream 0": frame(DATA, 0, 0, b"x"),
    "a stream after the next": frame(DATA, 2, 0, b"x"),
    "an END of no stream": frame(END, 1),
    "an ACK of no stream": frame(ACK, 1),
    "a GONE of no stream": frame(GONE, 1),
    "data behind a gap": frame(DATA, 1, 0, b"x") + frame(DATA, 1, 2, b"x"),
    "an END behind a gap": frame(DATA, 1, 0, b"x") + frame(END, 1, 2),
    "an END before the end": frame(DATA, 1, 0, b"x") + frame(END, 1, 0),
    "data behind the end": frame(DATA, 1, 0, b"x") + frame(END, 1, 1) + frame(DATA, 1, 1, b"x"),
    "an ACK of what was not sent": frame(DATA, 1, 0, b"x") + frame(ACK, 1, 1),
    "more than the window": b"".join(frame(DATA, 1, at, b"x" * (1 << 14)) for at in range(0, 1 << 17, 1 << 14)),
    "streams without end": b"".join(frame(DATA, number, 0, b"x") for number in range(1, 5000)),
    "resets without end": b"".join(frame(RESET, number) for number in range(1, 5000)),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_breaks_the_protocol_is_an_error(name: str) -> None:
    """An attacker on the inside loses its own link, and nothing is kept of what it sent."""
    link = Link(lambda stream: None)
    with pytest.raises(MalformedFrame):
        link.receive(MALFORMED[name])


def test_an_attacker_costs_a_bounded_amount_of_memory() -> None:
    """It fills the window of as many streams as there may be, opens more, and never reads."""
    streams: list[LinkStream] = []
    link, window = Link(streams.append), b"x" * (1 << 14)
    for number in range(1, 2 * STREAMS + 1):
        for at in range(0, WINDOW_BYTES, len(window)):
            link.receive(frame(DATA, number, at, window))
        streams[-1].write(b"y" * streams[-1].room_bytes)
        assert streams[-1].room_bytes == 0
    more = frame(DATA, 2 * STREAMS + 1, 0, b"x")
    link.receive(more + frame(DATA, 1, 0, window)[:-1])

    assert len(streams) == 2 * STREAMS
    assert all(len(stream.take()) == WINDOW_BYTES for stream in streams)
    assert frame(GONE, 2 * STREAMS + 1) in link.output()


@given(st.binary(max_size=300), st.integers(1, 50))
def test_any_bytes_are_frames_or_an_error(data: bytes, size: int) -> None:
    """Cut into any pieces; no other exception comes of them."""
    link = Link(lambda stream: None)
    with suppress(MalformedFrame):
        for at in range(0, len(data), size):
            link.receive(data[at : at + size])

"""Where the next session goes."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import MalformedRequest
from harness.gateway.shards.placement import choose_shard, read_wish

SESSION_0, SESSION_1 = "00" * 16, "01" * 16


@given(st.dictionaries(st.integers(0, 100), st.integers(0, 1000), min_size=1, max_size=20))
def test_no_other_shard_has_fewer(loads: dict[int, int]):
    chosen = choose_shard(loads)

    assert chosen is not None
    assert loads[chosen] == min(loads.values())


@given(st.integers(1, 20), st.integers(0, 200))
def test_a_burst_is_spread_evenly(shards: int, sessions: int):
    placed = [0] * shards
    for _ in range(sessions):
        number = choose_shard(dict(enumerate(placed)))
        assert number is not None
        placed[number] += 1

    assert max(placed) - min(placed) <= 1


def test_none_is_chosen_while_none_serves():
    assert choose_shard({}) is None


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (b"", None),
        (b'{"metadata": {"a": 1}}', None),
        (b'{"session_id": "%s"}' % SESSION_1.encode(), 1),
        (b'{"resumes": "%s"}' % SESSION_1.encode(), 1),
        (b'{"resumes": "%s", "session_id": "%s"}' % (SESSION_0.encode(), SESSION_0.encode()), 0),
    ],
)
def test_a_chosen_id_and_a_session_to_take_over_have_their_place(body: bytes, place: int | None):
    wish = read_wish(body)
    assert wish.find_place(2) == place
    assert wish.is_repeatable == (place is None)


def test_a_body_keeps_what_the_front_does_not_read():
    """Not a digit of it changes, and the id is added."""
    wish = read_wish(b'{"metadata": {"large": 12345678901234567890, "float": 1.0}}')
    assert msgspec.json.decode(wish.with_id(SESSION_1)) == {
        "metadata": {"large": 12345678901234567890, "float": 1.0},
        "session_id": SESSION_1,
    }


@pytest.mark.parametrize("body", [b"{", b"[]", b'"\xff"', b'{"session_id": 7}', b'{"a":' * 5000, b"null"])
def test_a_body_that_is_none_is_refused(body: bytes):
    with pytest.raises(MalformedRequest):
        read_wish(body)


def test_a_session_cannot_take_over_from_another_shard():
    """Its turns would have to move between two stores."""
    wish = read_wish(b'{"resumes": "%s", "session_id": "%s"}' % (SESSION_0.encode(), SESSION_1.encode()))
    with pytest.raises(MalformedRequest, match="names the shard"):
        wish.find_place(2)

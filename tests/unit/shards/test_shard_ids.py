"""The number of a shard in ids and keys."""

from hypothesis import given
from hypothesis import strategies as st

from harness.sessions.shard_ids import MOST_SHARDS, ShardPlace, find_shard

COUNTS = st.integers(1, MOST_SHARDS)
DIGITS = st.binary(min_size=16, max_size=16).map(bytes.hex)


@given(COUNTS, DIGITS, st.data())
def test_a_shard_finds_what_it_has_marked(shards: int, digits: str, data: st.DataObject):
    """Whatever the digits were, and it changes the first byte alone."""
    place = ShardPlace(data.draw(st.integers(0, shards - 1)), shards)
    marked = place.mark(digits)

    assert find_shard(marked, shards) == place.number
    assert place.has(marked)
    assert (len(marked), marked[2:]) == (len(digits), digits[2:])


@given(COUNTS, DIGITS)
def test_an_id_that_somebody_has_chosen_has_one_shard(shards: int, digits: str):
    """Every one of them has it or has not; together they have it once."""
    assert sum(ShardPlace(number, shards).has(digits) for number in range(shards)) == 1


@given(COUNTS, st.text(max_size=8))
def test_what_is_no_id_leads_somewhere(shards: int, text: str):
    """To a shard that exists, which says that it has never seen it."""
    assert 0 <= find_shard(text, shards) < shards

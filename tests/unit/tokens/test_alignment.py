"""Two tokenizations of one text are cut at every character boundary that both have, and nowhere else."""

from collections.abc import Sequence
from itertools import accumulate, chain

from hypothesis import example, given
from hypothesis import strategies as st

from harness.tokens.incremental import REPLACEMENT, Chunk, Spelled, align

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=REPLACEMENT), min_size=1, max_size=40)
SIZES = st.lists(st.integers(1, 6), min_size=1, max_size=40)


class Pieces:
    """Bytes cut anywhere; with `falls_back`, single ones wait for the end of their run, as in SentencePiece."""

    def __init__(self, raw: bytes, sizes: Sequence[int], *, falls_back: bool = False) -> None:
        ends = [*accumulate(chain(sizes, *[sizes] * (len(raw) // sum(sizes) + 1)))]
        ends = [end for end in ends if end < len(raw)] + [len(raw)]
        self.pieces = [raw[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        self.ids = [*range(len(self.pieces))]
        self.byte_ids = frozenset(i for i in self.ids if falls_back and len(self.pieces[i]) == 1)

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")

    def spelled(self) -> Spelled:
        return Spelled.of(self, self.ids)  # type: ignore[arg-type]  # as much of a tokenizer as it needs

    def bytes_of(self, part: slice) -> bytes:
        return b"".join(self.pieces[part])

    def borders(self) -> set[int]:
        return {0, *accumulate(map(len, self.pieces))}


def must_fit(chunks: Sequence[Chunk], own: Pieces, other: Pieces) -> None:
    """All ids in order, once, in chunks that spell the same text on both sides."""
    assert [i for each in chunks for i in own.ids[each.own]] == own.ids
    assert [i for each in chunks for i in other.ids[each.other]] == other.ids
    for each in chunks:
        assert own.bytes_of(each.own) == other.bytes_of(each.other) == each.text.encode()


@given(TEXT, SIZES, SIZES)
@example("👍🏽 日本語" * 3, [3, 2, 2], [1])
@example("é👍" * 4, [3], [2, 4])
def test_chunks_end_where_both_have_a_character_boundary(text: str, sizes: list[int], sizes_too: list[int]) -> None:
    """Every one of them, however tokens cut characters."""
    own, other = Pieces(text.encode(), sizes), Pieces(text.encode(), sizes_too)
    chunks = align(own.spelled(), other.spelled())
    must_fit(chunks, own, other)
    characters = {0, *accumulate(len(each.encode()) for each in text)}
    assert {0, *accumulate(len(each.text.encode()) for each in chunks)} == own.borders() & other.borders() & characters


@given(TEXT, SIZES, SIZES)
def test_a_run_of_single_bytes_is_one_text(text: str, sizes: list[int], sizes_too: list[int]) -> None:
    """With byte fallback: chunks are longer, and fit."""
    own, other = Pieces(text.encode(), sizes, falls_back=True), Pieces(text.encode(), sizes_too, falls_back=True)
    must_fit(align(own.spelled(), other.spelled()), own, other)


@given(TEXT, st.binary(min_size=1, max_size=6), SIZES, SIZES)
def test_bytes_that_are_no_text_are_in_marked_chunks(
    text: str, broken: bytes, sizes: list[int], more: list[int]
) -> None:
    """The other side reads U+FFFD in their place; chunks before and behind are as they were."""
    raw = text.encode() + broken + text.encode()
    own = Pieces(raw, sizes)
    other = Pieces(raw.decode(errors="replace").encode(), more)
    chunks = align(own.spelled(), other.spelled())
    assert [i for each in chunks for i in own.ids[each.own]] == own.ids
    for each in chunks:
        same = own.bytes_of(each.own) == other.bytes_of(each.other) == each.text.encode()
        assert same or REPLACEMENT in each.text


def test_other_texts_and_no_ids_have_no_chunks() -> None:
    """A tokenizer that normalizes spells another text."""
    own = Pieces(b"Hello", [2]).spelled()
    assert align(own, Pieces(b"hello", [2]).spelled()) == []
    nothing = Spelled([], "", [])
    assert align(nothing, nothing) == []

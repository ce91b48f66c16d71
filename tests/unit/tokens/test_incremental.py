"""Text that appears token by token: the same text in the end, stop strings at the right token, constant work."""

from collections.abc import Sequence
from itertools import groupby

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from harness.tokens.incremental import IncrementalDecoder, StopStrings
from harness.tokens.tokenizer import Tokenizer
from tests.builders import toy_tokenizer

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\N{REPLACEMENT CHARACTER}"), max_size=60)
PIECES = st.lists(st.integers(1, 6), min_size=1, max_size=60)


class PieceTokenizer:
    """Bytes cut anywhere: a vocabulary in which tokens end and begin inside characters."""

    def __init__(self, text: str, sizes: Sequence[int]) -> None:
        raw = text.encode()
        self.pieces: list[bytes] = []
        position = 0
        while position < len(raw):
            size = sizes[len(self.pieces) % len(sizes)]
            self.pieces.append(raw[position : position + size])
            position += size

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")


@given(TEXT, PIECES)
@example("日本語テキスト" * 4, [3, 2, 2])
@example("👍🏽" * 6, [5])
@example("a日本語" * 6, [2, 3])
def test_the_pieces_add_up_to_the_text(text, sizes):
    """However tokens cut characters: nothing that is pushed out is ever taken back, and in the end it is all there."""
    tokenizer = PieceTokenizer(text, sizes)
    decoder, said = IncrementalDecoder(tokenizer.decode), ""
    for i in range(len(tokenizer.pieces)):
        said += decoder.push([i])
        assert text.startswith(said)

    assert said == text


BYTES_AT = 256
"""Ids below it are bytes; those above are a text each."""


class FallbackTokenizer:
    """Falls back to bytes as SentencePiece does: a run of bytes is one text, or a replacement character for each."""

    byte_ids = frozenset(range(BYTES_AT))
    texts = (*"ab 日", "stop")

    def decode(self, ids: Sequence[int]) -> str:
        texts = []
        for is_byte, run in groupby(ids, key=self.byte_ids.__contains__):
            if not is_byte:
                texts += [self.texts[each - BYTES_AT] for each in run]
                continue
            raw = bytes(run)
            try:
                texts.append(raw.decode())
            except UnicodeDecodeError:
                texts.append("\N{REPLACEMENT CHARACTER}" * len(raw))
        return "".join(texts)


FALLBACK = FallbackTokenizer()
FALLBACK_IDS = st.lists(
    st.one_of(
        st.integers(BYTES_AT, BYTES_AT + len(FALLBACK.texts) - 1).map(lambda each: [each]),
        st.sampled_from(["🛑", "〈end〉", "日a", "é"]).map(lambda text: list(text.encode())),
        st.integers(0, BYTES_AT - 1).map(lambda byte: [byte]),
    ),
    max_size=30,
).map(lambda parts: [each for part in parts for each in part])


@given(FALLBACK_IDS, PIECES)
@example(list("日🛑".encode()) + [0xF0] * 20 + [BYTES_AT], [1])
def test_bytes_that_a_tokenizer_falls_back_to_are_one_text(ids, sizes):
    """However the ids are cut: a run of them is read as a whole."""
    decoder, said, begin = IncrementalDecoder(FALLBACK.decode, FALLBACK.byte_ids), "", 0
    while begin < len(ids):
        size = sizes[begin % len(sizes)]
        said += decoder.push(ids[begin : begin + size])
        assert FALLBACK.decode(ids).startswith(said)
        begin += size

    assert said + decoder.end() == FALLBACK.decode(ids)


@given(FALLBACK_IDS, st.lists(st.sampled_from(["🛑", "〈end〉", "日", "aé", "日a", "stop", "b 日🛑"]), max_size=3))
@example(list("a🛑".encode()), ["🛑"])
@example([*"〈end".encode(), *"〉".encode(), BYTES_AT], ["〈end〉"])
@example([0xFF, *"🛑".encode(), BYTES_AT], ["🛑"])
def test_a_stop_string_of_bytes_is_found_at_the_byte_that_completes_it(ids, stops):
    """Though the run may continue, and be no text then."""
    search = StopStrings(FALLBACK.decode, stops, FALLBACK.byte_ids)
    found = next((n for n, token_id in enumerate(ids, start=1) if search.push(token_id) is not None), None)

    assert found == naive_stop(FALLBACK.decode, ids, stops)


def test_work_per_byte_does_not_grow():
    """A script of which the vocabulary has no character is one run, however long the text is (I11)."""
    decoded: list[int] = []

    def counting(ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return FALLBACK.decode(ids)

    search = StopStrings(counting, ["never said"], FALLBACK.byte_ids)
    ids = list("ภาษาไทย".encode()) * 100
    for token_id in ids:
        search.push(token_id)

    assert sum(decoded) <= 4 * len(ids)


@given(st.lists(st.binary(min_size=1, max_size=5), max_size=30))
def test_bytes_that_are_no_text_do_not_hold_back_what_follows(pieces):
    """An output of any bytes: at most the last few tokens are held back."""
    tokenizer = PieceTokenizer("", [1])
    tokenizer.pieces = [*pieces, *[b"x"] * 5]
    decoder = IncrementalDecoder(tokenizer.decode)

    said = "".join(decoder.push([i]) for i in range(len(tokenizer.pieces)))

    assert said.endswith("xxxxx")


def naive_stop(decode, ids: Sequence[int], stops: Sequence[str]) -> int | None:
    """After how many tokens the growing text contains a stop string."""
    return next((n for n in range(1, len(ids) + 1) if any(stop in decode(ids[:n]) for stop in stops)), None)


def found_stop(decode, ids: Sequence[int], stops: Sequence[str]) -> int | None:
    search = StopStrings(decode, stops)
    return next((n for n, token_id in enumerate(ids, start=1) if search.push(token_id) is not None), None)


SMALL = st.text("ab\né日", max_size=40)
STOPS = st.lists(st.text("ab\né日", min_size=1, max_size=5), max_size=4)


@given(SMALL, PIECES, STOPS)
@example("aaab", [1], ["aab"])
@example("日日", [2], ["日"])
def test_a_stop_string_is_found_at_the_token_that_completes_it(text, sizes, stops):
    """At the same token as a search through the whole text after every token."""
    tokenizer = PieceTokenizer(text, sizes)
    ids = range(len(tokenizer.pieces))

    assert found_stop(tokenizer.decode, ids, stops) == naive_stop(tokenizer.decode, ids, stops)


def test_of_two_stop_strings_the_one_that_begins_first_is_reported():
    tokenizer = PieceTokenizer("one two", [7])

    assert StopStrings(tokenizer.decode, ["two", "ne"]).push(0) == "ne"


def test_without_stop_strings_nothing_is_decoded():
    search = StopStrings(lambda ids: pytest.fail("decoded"), ())

    assert search.push(5) is None


@pytest.mark.parametrize("text", ["plain ascii ", "日本語テキスト", "👍🏽", "�"])
def test_work_per_token_does_not_grow(text):
    """Ids decoded per pushed token stay below a small constant, however long the text is (I11)."""
    tokenizer = toy_tokenizer()
    decoded: list[int] = []

    def counting(ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return tokenizer.decode(ids)

    ids = tokenizer.encode_plain(text * 200)
    search = StopStrings(counting, ["never said"])
    for token_id in ids:
        search.push(token_id)

    assert max(decoded) <= 16
    assert sum(decoded) <= 24 * len(ids)


@pytest.mark.model
def test_the_real_tokenizer_streams_what_it_decodes(model_dir):
    """SmolLM2's byte-level tokens, over scripts and emoji whose characters span tokens."""
    tokenizer = Tokenizer.load(model_dir)
    text = "Straße, 日本語のテキスト, हिन्दी, العربية, 👩‍👩‍👧‍👦 🏴‍☠️, ∑∫√ and \t tabs\r\n" * 5
    ids = tokenizer.encode_plain(text)
    decoder = IncrementalDecoder(tokenizer.decode)

    assert "".join(decoder.push([token_id]) for token_id in ids) == tokenizer.decode(ids) == text


@pytest.mark.model
@pytest.mark.parametrize("stop", ["語の", "👧", "\r\nS", " and \t", "العر", "never"])
def test_the_real_tokenizer_stops_where_a_naive_search_does(model_dir, stop):
    tokenizer = Tokenizer.load(model_dir)
    ids = tokenizer.encode_plain("Straße, 日本語のテキスト, العربية, 👩‍👩‍👧‍👦 and \t tabs\r\nS" * 2)

    assert found_stop(tokenizer.decode, ids, [stop]) == naive_stop(tokenizer.decode, ids, [stop])

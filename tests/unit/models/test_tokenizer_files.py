"""The tokenizer that needs no download."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from harness.lab.models.tokenizer_files import SPECIALS, WORDS, small_tokenizer, write_small_tokenizer
from harness.tokens.tokenizer import Tokenizer

CALL = '<tool_call>\n{"name": "guess", "arguments": {"number": 12}}\n</tool_call>'


def test_any_text_comes_back_and_a_call_is_short(tmp_path: Path):
    """Bytes are tokens, so there is no text that it cannot write."""
    tokenizer = Tokenizer.load(write_small_tokenizer(tmp_path, WORDS))

    @given(st.text(st.characters(exclude_categories=["Cs"])) | st.lists(st.sampled_from(WORDS)).map("".join))
    def comes_back(text: str) -> None:
        assert tokenizer.decode(tokenizer.encode_plain(text)) == text

    comes_back()
    assert len(tokenizer.encode_plain(CALL)) < 20 < len(CALL)
    assert [tokenizer.marker_id(text) for text in SPECIALS] == [0, 1, 2]


def test_it_is_written_once(tmp_path: Path):
    folder = small_tokenizer(tmp_path)
    written = (folder / "tokenizer.json").stat().st_mtime_ns

    assert small_tokenizer(tmp_path) == folder
    assert (folder / "tokenizer.json").stat().st_mtime_ns == written

"""Byte-level tokenizers: words have the ids of the whole text, ids the text of the library, or nothing is looked up."""

from functools import cache
from string import ascii_letters, digits, printable, punctuation

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from harness.tokens.byte_level import WordEncoder, open_spellings, open_word_encoder

QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+('s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(*, use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def split(pattern: str, behavior: str = "isolated") -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior)


CUTS = {
    "qwen": pre_tokenizers.Sequence([split(QWEN), byte_level(use_regex=False)]),
    "o200k": pre_tokenizers.Sequence([split(O200K), byte_level(use_regex=False)]),
    "punctuation": pre_tokenizers.Sequence(
        [split(r"\p{N}{1,3}"), split(r"[\p{P}\p{S}]+|\p{M}|[^\]\p{Zs}(]"), byte_level(use_regex=False)]
    ),
    "gpt2": byte_level(use_regex=True),
    "digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level(use_regex=True)]),
    "words with spaces": pre_tokenizers.Sequence([pre_tokenizers.Digits(), byte_level(use_regex=False)]),
    "letters and a space": pre_tokenizers.Sequence([split(r"\p{L}+ ?|."), byte_level(use_regex=False)]),
}
TEXTS = st.text(st.characters(max_codepoint=127), max_size=80) | st.text(" \n\r\t'sSlLtT01aZ._", max_size=80)
TEXTS |= st.lists(st.text("'sStT01aZ._(]\n", max_size=4) | st.sampled_from(["the", "athe"]), max_size=20).map(" ".join)


@cache
def trained(cut: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = CUTS[cut], decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    words = [f"{a}{b} {b}'ll {a}{a}\n\n  {b}1{a}" for a in ascii_letters for b in ("the", digits, punctuation)]
    tokenizer.train_from_iterator(words, trainer)
    return tokenizer


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@cache
def opened(cut: str) -> WordEncoder | None:
    return open_word_encoder(trained(cut), lambda text: ids_of(trained(cut), text))


@pytest.mark.parametrize("cut", CUTS)
@given(texts=st.lists(TEXTS, max_size=4))
@example(texts=[printable, f"{printable} ", "a  b", "a \n b", "it's WE'LL x2048  ", "]]", "athe the'll the the"])
def test_words_have_the_ids_that_they_have_in_the_text(cut, texts):
    """Whatever stands around them, when they come first and again."""
    tokenizer, words = trained(cut), opened(cut)

    assert words is not None
    assert [words.encode(text) for text in texts] == [ids_of(tokenizer, text) for text in texts]


def prepare(tokenizer: Tokenizer, case: str) -> None:
    match case:
        case "another normalizer":
            tokenizer.normalizer = normalizers.Lowercase()
        case "truncation":
            tokenizer.enable_truncation(4)
        case "another cut":
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        case "no cut":
            tokenizer.pre_tokenizer = None  # type: ignore[assignment]  # as the library takes it
        case "another behavior":
            tokenizer.pre_tokenizer = split(r"\s", "removed")
        case "classes of classes":
            tokenizer.pre_tokenizer = split(r"[a-z&&[^b]]+")
        case "an expression that Python has not":
            tokenizer.pre_tokenizer = split(r"\p{L}+\K")


@pytest.mark.parametrize(
    "case",
    [
        "another normalizer",
        "truncation",
        "another cut",
        "no cut",
        "another behavior",
        "classes of classes",
        "an expression that Python has not",
    ],
)
def test_a_tokenizer_that_is_not_understood_encodes_whole_texts(case):
    tokenizer = Tokenizer.from_str(trained("gpt2").to_str())
    prepare(tokenizer, case)

    assert open_word_encoder(tokenizer, lambda text: ids_of(tokenizer, text)) is None


def test_an_encoder_that_looks_beyond_words_is_not_replaced():
    """One text with other ids than its words is enough."""
    tokenizer = trained("qwen")
    ids = {"": 0}

    assert open_word_encoder(tokenizer, lambda text: [ids.setdefault(text, len(ids))]) is None


@cache
def with_added_tokens() -> Tokenizer:
    tokenizer = Tokenizer.from_str(trained("gpt2").to_str())
    tokenizer.add_special_tokens(["<|end|>", "\N{FULLWIDTH VERTICAL LINE}"])
    tokenizer.add_tokens([AddedToken(text) for text in ("\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}x", "caf\u00e9 \n")])
    return tokenizer


@given(ids=st.lists(st.integers(0, 410)), text=st.text())
def test_ids_have_the_text_that_the_library_gives_them(ids, text):
    """Whatever bytes they put side by side; ids beyond the vocabulary are left out."""
    tokenizer = with_added_tokens()
    ids += ids_of(tokenizer, text)
    spellings = open_spellings(tokenizer)

    assert spellings is not None
    assert spellings.decode(ids) == tokenizer.decode(ids, skip_special_tokens=False)


def test_a_tokenizer_with_another_decoder_is_left_to_its_library():
    """Pieces of words are put together in ways of their own."""
    tokenizer = Tokenizer(models.BPE())
    assert open_spellings(tokenizer) is None

    tokenizer.decoder = decoders.Metaspace()
    assert open_spellings(tokenizer) is None

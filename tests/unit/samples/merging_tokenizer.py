"""A small tokenizer with merges: its tokens hold several characters, and parts of characters."""

import json
from functools import cache

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as RawTokenizer

from harness.tokens.tokenizer import Tokenizer

END = "<|im_end|>"

TORN = ("«", '"}]')  # the last byte of 猫, and the end of a list: a token that begins inside a character

LABELS = ("cat", "dog", "a [b] {c}", 'say "]}"', "back\\slash", "café", "猫", "犬小屋", "🐈", "naïve 🐕 猫", "x" * 12)


def spell(*objects: object) -> str:
    """A list as a model writes it."""
    return json.dumps(list(objects), ensure_ascii=False)


@cache
def merging_tokenizer() -> Tokenizer:
    """Byte-level BPE, trained on lists of objects without the split at punctuation: merges cross brackets, quotes."""
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    corpus = [
        spell(*({"bbox_2d": [x, y, x + 10, y + 20], "label": label} for x, y in ((1, 2), (30, 4), (5, 60))))
        for label in LABELS
        for _ in range(3)
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        max_token_length=8,
        special_tokens=[AddedToken(END, special=True, normalized=False)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(corpus, trainer)
    raw = _with_merge(raw, *TORN)
    return Tokenizer(raw, eos_ids=frozenset({raw.token_to_id(END)}))


def _with_merge(raw: RawTokenizer, left: str, right: str) -> RawTokenizer:
    """`raw` with one more token, which its encoding prefers least."""
    written = json.loads(raw.to_str())
    written["model"]["vocab"][left + right] = len(written["model"]["vocab"])
    written["model"]["merges"].append([left, right])
    return RawTokenizer.from_str(json.dumps(written))


def bytes_of(token_id: int) -> int:
    """How many bytes of text a token has: the byte alphabet writes each as one character."""
    return len(merging_tokenizer().token_text(token_id))


@cache
def byte_ids() -> tuple[int, ...]:
    """The token of each single byte that UTF-8 uses, by its value."""
    raw = merging_tokenizer()
    spelled = _byte_alphabet()
    return tuple(raw._raw.token_to_id(spelled[byte]) for byte in range(256))


def _byte_alphabet() -> list[str]:
    """How the byte-level alphabet spells each byte: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)]

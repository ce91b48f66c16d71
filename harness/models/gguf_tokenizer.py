"""The byte-level BPE tokenizer that a GGUF describes, as a `tokenizer.json`.

A GGUF names its pre-tokenizer instead of spelling it out. SmolLM's splits every digit off before the usual GPT-2
pattern; leaving that step out changes the ids of runs of spaces before a number.
"""

from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from harness.errors import ModelError


class _TokenType(IntEnum):
    """Token types of llama.cpp that mean an added token."""

    CONTROL = 3
    USER_DEFINED = 4


def build_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """The tokenizer in the metadata `fields` of a GGUF; raises `ModelError` when its kind is not known here."""
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if (kind, pre) != ("gpt2", "smollm"):
        raise ModelError(f"expected a tokenizer of kind gpt2/smollm in the GGUF, got {kind}/{pre}")
    tokens = fields["tokenizer.ggml.tokens"]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [_pair(merge) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, tokens, fields["tokenizer.ggml.token_type"])
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, right = merge.split(" ")
    return left, right


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    for token, token_type in zip(tokens, types, strict=True):
        if token_type == _TokenType.CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif token_type == _TokenType.USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)])

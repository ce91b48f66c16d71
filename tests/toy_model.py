"""A tokenizer and template that need no download: bytes as tokens, ChatML markers, the harness's own template."""

import json
from importlib import resources
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def write_toy_model(directory: Path) -> Path:
    """A HuggingFace folder (tokenizer and template, no weights): ids 0..2 are special, 3..258 are bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate([*SPECIALS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    template = resources.files("harness.models").joinpath("chatml_hermes.jinja").read_text(encoding="utf-8")
    (directory / "chat_template.jinja").write_text(template)
    return directory

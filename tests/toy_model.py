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


def write_toy_weights(folder: Path, seed: int) -> Path:
    """A tiny random model with the toy tokenizer: a folder that the local engine loads."""
    import torch
    import transformers

    torch.manual_seed(seed)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"vocab_size": 259, "eos_token_id": 2, "bos_token_id": 0, "pad_token_id": 0}
    config = transformers.LlamaConfig(**shape, **ids, num_key_value_heads=2, max_position_embeddings=2048)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return write_toy_model(folder)

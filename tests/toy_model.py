"""A tokenizer and template that need no download: bytes as tokens, ChatML markers, the harness's own template."""

from pathlib import Path

from harness.lab.models.tokenizer_files import SPECIALS
from harness.lab.models.tokenizer_files import write_small_tokenizer as write_toy_model

__all__ = ["SPECIALS", "write_toy_model", "write_toy_weights"]


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

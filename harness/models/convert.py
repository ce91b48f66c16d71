"""A HuggingFace model folder from a GGUF file: weights, configuration, tokenizer and our chat template.

Only what the catalogue holds can be converted: llama architecture with a SmolLM tokenizer. The template is the
project's own because the model's ignores `tools`.
"""

import hashlib
import json
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness.errors import ModelError
from harness.machine.progress import Phase, Progress
from harness.models.gguf_tokenizer import build_tokenizer
from harness.models.gguf_weights import Heads, write_weights

FORMAT_VERSION = 1
"""Goes up when the same GGUF converts to something else, so that cached folders are made again."""

_TEMPLATE = "chatml_hermes.jinja"
_END_OF_TEXT = "<|endoftext|>"


def template_digest() -> str:
    """SHA-256 of the chat template that conversion would write."""
    return hashlib.sha256(_template()).hexdigest()


def require_converter() -> None:
    """Raise `ModelError` unless what conversion needs is installed."""
    if find_spec("gguf") is None:
        raise ModelError("converting models needs `pip install 'session-harness[local]'`")


def convert_gguf(gguf: Path, folder: Path, progress: Progress) -> None:
    """Write the model in `gguf` into the existing directory `folder`.

    Raises `ModelError` when the file is not of a kind that can be converted.
    """
    from gguf import GGUFReader  # comes with the `local` extra

    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "llama":
        raise ModelError(f"expected a GGUF of architecture llama, got {fields['general.architecture']}")
    progress(Phase.CONVERT, 0, 0)
    heads = Heads(fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"])
    write_weights(reader, heads, folder / "model.safetensors", progress)
    build_tokenizer(fields).save(str(folder / "tokenizer.json"))
    _write_json(folder / "config.json", _config(fields, ties_embeddings=not _has_output(reader)))
    _write_json(folder / "generation_config.json", _generation_config(fields))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(fields))
    (folder / "chat_template.jinja").write_bytes(_template())


def _has_output(reader: Any) -> bool:
    """Whether the output projection is stored apart from the embedding."""
    return any(tensor.name == "output.weight" for tensor in reader.tensors)


def _config(fields: dict[str, Any], *, ties_embeddings: bool) -> dict[str, Any]:
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "head_dim": hidden // heads,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields["llama.rope.freq_base"],  # where transformers 4 and the servers look for it
        "rope_parameters": {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        "tie_word_embeddings": ties_embeddings,
        "vocab_size": fields["llama.vocab_size"],
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        **_special_ids(fields),
    }


def _generation_config(fields: dict[str, Any]) -> dict[str, Any]:
    """A turn ends at the end-of-turn id, and at the end-of-text id that the base model was trained on."""
    ids = _special_ids(fields)
    end_of_text = fields["tokenizer.ggml.tokens"].index(_END_OF_TEXT)
    return {**ids, "eos_token_id": sorted({ids["eos_token_id"], end_of_text})}


def _special_ids(fields: dict[str, Any]) -> dict[str, int]:
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    """Names the generic class: a specific one would build its own pre-tokenizer instead of reading tokenizer.json."""
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }


def _template() -> bytes:
    return (files("harness.tokens") / "templates" / _TEMPLATE).read_bytes()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

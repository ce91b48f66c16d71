"""Conversion of a GGUF file to a HuggingFace model folder: weights, configuration, tokenizer and our chat template.

Only models of the catalogue can be converted: llama architecture with a SmolLM tokenizer, a byte-level BPE.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from enum import IntEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from harness.errors import ModelError
from harness.lab.models.tokenizer_files import find_template
from harness.lab.models.weight_files import TensorShape, write_bfloat16
from harness.machine.cache import FetchPhase, FetchProgress

FORMAT_VERSION = 1
"""Version that goes up when the same GGUF converts to something else, so that cached folders are made again."""

TEMPLATE = find_template("chatml_hermes")  # the models' own template ignores `tools`
_END_OF_TEXT = "<|endoftext|>"


def require_converter() -> None:
    """Raise `ModelError` unless the libraries that conversion needs are installed."""
    if find_spec("gguf") is None:
        raise ModelError("converting models needs `pip install 'session-harness[local]'`")


def convert_gguf(gguf: Path, folder: Path, progress: FetchProgress) -> None:
    """Write the model in `gguf` into the existing directory `folder`. Raises `ModelError` if it is of another kind."""
    from gguf import GGUFReader  # comes with the `local` extra

    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "llama":
        raise ModelError(f"expected a GGUF of architecture llama, got {fields['general.architecture']}")
    progress(FetchPhase.CONVERT, 0, 0)
    heads = Heads(fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"])
    write_weights(reader, heads, folder / "model.safetensors", progress)
    _tokenizer(fields).save(str(folder / "tokenizer.json"))
    has_output = any(tensor.name == "output.weight" for tensor in reader.tensors)  # besides the embedding
    write_json(folder / "config.json", _config(fields, ties_embeddings=not has_output))
    # A turn ends at the end-of-turn id, and at the end-of-text id that the base model was trained on.
    ids, tokens = _special_ids(fields), fields["tokenizer.ggml.tokens"]
    ends = sorted({ids["eos_token_id"], tokens.index(_END_OF_TEXT)})
    write_json(folder / "generation_config.json", {**ids, "eos_token_id": ends})
    tokenizer_config = {
        # The generic class: a specific one would build its own pre-tokenizer instead of reading tokenizer.json.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[ids["bos_token_id"]],
        "eos_token": tokens[ids["eos_token_id"]],
        "pad_token": tokens[ids["pad_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / "tokenizer_config.json", tokenizer_config)
    shutil.copyfile(TEMPLATE, folder / "chat_template.jinja")


class _TokenType(IntEnum):
    """Token types of llama.cpp that mean an added token."""

    CONTROL = 3
    USER_DEFINED = 4


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer in the metadata. Raises `ModelError` if its kind is unknown."""
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if (kind, pre) != ("gpt2", "smollm"):
        raise ModelError(f"expected a tokenizer of kind gpt2/smollm in the GGUF, got {kind}/{pre}")
    tokens = fields["tokenizer.ggml.tokens"]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    pairs = (merge.split(" ") for merge in fields["tokenizer.ggml.merges"])
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[(left, right) for left, right in pairs]))
    # A GGUF only names its pre-tokenizer. SmolLM's splits every digit off before the usual GPT-2 pattern. Without that,
    # runs of spaces before a number get other ids.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for token, token_type in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True):
        if token_type == _TokenType.CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif token_type == _TokenType.USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)])
    return tokenizer


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


def _special_ids(fields: dict[str, Any]) -> dict[str, int]:
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


_OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROWS = 4096


class Heads(NamedTuple):
    query: int
    key_value: int


def write_weights(reader: Any, heads: Heads, path: Path, progress: FetchProgress) -> None:
    """Write every tensor of the GGUF `reader` to the safetensors file `path`."""
    # transformers can do this too, but imports torch and accelerate first and takes several times as long.
    from gguf import dequantize  # comes with the `local` extra

    def weights() -> Iterator[npt.NDArray[np.float32]]:
        for tensor in reader.tensors:
            if ".attn_q." in tensor.name:
                yield _split_rotary_halves(dequantize(tensor.data, tensor.tensor_type), heads.query)
            elif ".attn_k." in tensor.name:
                yield _split_rotary_halves(dequantize(tensor.data, tensor.tensor_type), heads.key_value)
            else:
                for row in range(0, len(tensor.data), _ROWS):  # in parts: dequantizing takes five times the size
                    yield dequantize(tensor.data[row : row + _ROWS], tensor.tensor_type)

    shapes = [
        TensorShape(_huggingface_name(tensor.name), tuple(int(length) for length in reversed(tensor.shape)))
        for tensor in reader.tensors
    ]
    write_bfloat16(path, shapes, weights(), progress)


def _huggingface_name(name: str) -> str:
    """Turn `blk.3.attn_q.weight` into `model.layers.3.self_attn.q_proj.weight`. Raises `KeyError` if unknown."""
    match name.split("."):
        case ["blk", layer, module, kind]:
            return f"model.layers.{layer}.{_LAYER_NAMES[module]}.{kind}"
        case [module, kind]:
            return f"{_OUTER_NAMES[module]}.{kind}"
        case _:
            raise KeyError(name)


def _split_rotary_halves(weights: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    rows, *rest = weights.shape  # llama.cpp interleaves the two rotary halves of each head
    interleaved = weights.reshape(heads, rows // heads // 2, 2, *rest)
    return interleaved.swapaxes(1, 2).reshape(weights.shape)

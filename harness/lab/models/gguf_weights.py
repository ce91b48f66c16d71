"""Weights of a llama-architecture GGUF as bfloat16 safetensors, with numpy alone.

transformers can do this too, but imports torch and accelerate first and takes several times as long. Names differ
between the formats, and the row order of query and key projections. Quantization is undone here.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from harness.lab.models.safetensors_file import TensorShape, write_bfloat16
from harness.machine.progress import FetchProgress

_OUTER_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
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

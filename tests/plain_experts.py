"""Tiny random mixtures of experts, and the experts that transformers' own routers choose for tokens."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.types import TokenIds
from tests.toy_model import write_toy_model

_SHAPE = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_IDS = {"vocab_size": 259, "eos_token_id": 2, "bos_token_id": 0, "pad_token_id": 0, "max_position_embeddings": 2048}

MIXTURES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "8 experts": ("Qwen3MoeConfig", {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}),
    "300 experts": ("Qwen3MoeConfig", {"num_experts": 300, "num_experts_per_tok": 3, "moe_intermediate_size": 8}),
    "a dense layer, sigmoid": (
        "Glm4MoeConfig",
        {"n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_shared_experts": 1},
    ),
}
"""Configurations by what is special about them."""


def new_mixture(kind: str, seed: int = 0) -> Any:
    """A random model of `kind`, in float32."""
    import torch
    import transformers

    name, more = MIXTURES[kind]
    sizes = {"intermediate_size": 96, "moe_intermediate_size": 32, "initializer_range": 0.1}
    torch.manual_seed(seed)
    config = getattr(transformers, name)(**{**_SHAPE, **_IDS, **sizes, **more})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def write_mixture(folder: Path, kind: str, seed: int = 0) -> Path:
    """A folder with that model and the toy tokenizer."""
    new_mixture(kind, seed).save_pretrained(folder)
    return write_toy_model(folder)


def plain_experts(folder: Path, ids: TokenIds) -> npt.NDArray[np.int64]:
    """Experts of each token by one pass over all of them, in ascending order, [tokens, layers, top_k]; 0 if dense."""
    return experts_of(_load(folder), ids)


def experts_of(model: Any, ids: TokenIds) -> npt.NDArray[np.int64]:
    """See `plain_experts`: the ids of the greatest logits of each router."""
    import torch

    config = model.config
    experts = np.zeros((len(ids), config.num_hidden_layers, config.num_experts_per_tok), np.int64)
    with torch.inference_mode():
        tokens = torch.from_numpy(ids.astype(np.int64))[None]
        logits = model(tokens, use_cache=False, output_router_logits=True).router_logits
    for layer, scores in enumerate(logits, start=config.num_hidden_layers - len(logits)):  # dense layers come first
        chosen = scores.float().topk(config.num_experts_per_tok).indices
        experts[:, layer] = np.sort(chosen.numpy())
    return experts


@cache
def _load(folder: Path) -> Any:
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

"""Random models of a few thousand weights, segments that they might have sampled, and packs of those."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers

from harness.training import Pack, Segment

VOCABULARY = 61


def tiny_model(
    config_class: str = "LlamaConfig", *, seed: int = 0, dtype: torch.dtype = torch.float64, **more: Any
) -> Any:
    """Two layers, two query heads on each key head, output weights tied to the embedding."""
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "head_dim": 4, "tie_word_embeddings": True, "initializer_range": 0.3}
    settings = {**shape, **heads, "vocab_size": VOCABULARY, "pad_token_id": 0, **more}
    torch.manual_seed(seed)
    return (
        transformers.AutoModelForCausalLM.from_config(getattr(transformers, config_class)(**settings)).to(dtype).eval()
    )


def tiny_qwen3_vl() -> Any:
    """A random Qwen3-VL, whose positions have four rows: of the text, and of time, height and width."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rope_parameters": rope}
    size = {"hidden_size": 16, "intermediate_size": 24}
    text = {**size, **heads, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "initializer_range": 0.3}
    vision = {**size, "depth": 1, "num_heads": 2, "out_hidden_size": 16, "deepstack_visual_indexes": [0]}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config={**vision, "num_position_embeddings": 16})
    torch.manual_seed(0)
    return transformers.Qwen3VLForConditionalGeneration(config).to(torch.float64).eval()


def plain_logprobs(model: Any, ids: np.ndarray) -> torch.Tensor:
    """Logprobs of the tokens of one segment but its first, by the model's own forward pass, shape [n - 1]."""
    tokens = torch.from_numpy(ids.astype(np.int64))
    return model(tokens[None]).logits[0, :-1].log_softmax(-1)[torch.arange(len(ids) - 1), tokens[1:]]


def gradient(model: Any) -> torch.Tensor:
    """Of all weights, flat; 0 where there is none."""
    grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in model.parameters()]
    return torch.cat([each.flatten().clone() for each in grads])


def distance(mine: torch.Tensor, other: torch.Tensor) -> float:
    """Relative to the size of the other one."""
    return float((mine - other).norm() / other.norm())


def some_segments(model: Any, lengths: Sequence[int] = (9, 4, 17, 2, 11, 6, 23, 3, 8, 5, 13, 7)) -> list[Segment]:
    """Prompts, trained and masked tokens, tool results between them, tokens that an encoder appended.

    Behavior and proximal logprobs lie around those of `model`, so ratios lie inside and outside of clip ranges, and
    some tokens have not met their next version.
    """
    segments = []
    with torch.no_grad():
        for seed, length in enumerate(lengths):
            rng = np.random.default_rng([length, seed])
            ids = rng.integers(1, VOCABULARY, length)
            kind = rng.choice(np.array(["context", "masked", "trained", "appended"]), size=length, p=[0.2, 0.2, 0.6, 0])
            kind[0], kind[-1] = "context", "trained"
            if length > 8:
                kind[-2:] = "appended"
            is_sampled = (kind == "masked") | (kind == "trained")
            current = np.concatenate([[0.0], plain_logprobs(model, ids).double().numpy()])
            proximal = np.where(is_sampled, current + rng.normal(0, 0.3, length), 0).astype(np.float32)
            has_met = is_sampled & (rng.random(length) < 0.6)
            behavior = np.where(has_met, proximal + rng.normal(0, 0.5, length), proximal).astype(np.float32)
            versions = np.where(is_sampled, rng.integers(3, 6, length), -1)
            segments.append(
                Segment(
                    ids=ids,
                    loss_mask=(kind == "trained") | (kind == "appended"),
                    advantages=np.where(kind == "appended", 1.0, rng.normal(0, 1)).astype(np.float32),
                    behavior_logprobs=behavior,
                    proximal_logprobs=proximal,
                    behavior_versions=versions,
                    proximal_versions=versions + has_met,
                )
            )
    return segments


def in_packs(segments: Sequence[Segment], packs: int, position_rows: int = 1) -> list[Pack]:
    """All of them, in `packs` packs of about equal numbers."""
    return [
        Pack.of([segments[place] for place in places], places.tolist(), position_rows)
        for places in np.array_split(np.arange(len(segments)), packs)
    ]

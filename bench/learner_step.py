"""What one step of the reference learner costs on one thread, at the size of a model that is trained on a CPU.

    python bench/learner_step.py [--tokens 4450] [--packing-length 1200] [--steps 10]

Two Llama-like layers of width 128, a vocabulary of 600: half a million weights. Segments have 133 to 145 tokens, a
quarter of them trained. CPU time, so other processes of the machine count little; the least of all steps, and their
median.
"""

import argparse
import statistics
import time

import numpy as np
import torch
import transformers

from harness import LossKind, LossSettings, OptimizerSettings, Pack, Segment, TorchLearner, plan_packs

VOCABULARY = 600


def make_segments(tokens: int) -> list[Segment]:
    """About so many tokens, in segments of the lengths of a short game."""
    rng, segments = np.random.default_rng(0), list[Segment]()
    while tokens > 0:
        length = int(rng.integers(133, 146))
        is_sampled = (rng.random(length) < 0.25) & (np.arange(length) > 0)
        logprobs, versions = np.where(is_sampled, -6.4, 0.0), np.where(is_sampled, 0, -1)
        advantages = is_sampled * rng.normal()
        ids = rng.integers(0, VOCABULARY, length)
        segments.append(Segment(ids, is_sampled, advantages, logprobs, logprobs, versions, versions))
        tokens -= length
    return segments


def make_learner() -> TorchLearner:
    """Random weights."""
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=True, **shape)
    model = transformers.AutoModelForCausalLM.from_config(config)
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} weights")
    return TorchLearner(model, LossSettings(LossKind.DECOUPLED_PPO), OptimizerSettings())


def main() -> None:
    """Print a line of figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4450)
    parser.add_argument("--packing-length", type=int, default=1200)
    parser.add_argument("--steps", type=int, default=10)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    segments = make_segments(chosen.tokens)
    packs = [
        Pack.of([segments[place] for place in places], places)
        for places in plan_packs([len(segment) for segment in segments], chosen.packing_length)
    ]
    learner = make_learner()
    passes, updates = [], []
    for _ in range(chosen.steps):
        began = time.thread_time()
        tokens = sum(learner.accumulate(pack).trained_tokens for pack in packs)
        learned = time.thread_time()
        learner.finish_step(tokens)
        passes.append(learned - began)
        updates.append(time.thread_time() - learned)
    print(
        f"{sum(len(pack) for pack in packs):,} tokens in {len(packs)} packs: forward and backward"
        f" {min(passes):.3f} s CPU at least, median {statistics.median(passes):.3f} s;"
        f" update {statistics.median(updates):.4f} s"
    )


if __name__ == "__main__":
    main()

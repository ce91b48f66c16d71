"""Terminal summary of a training step."""

from collections.abc import Mapping

from harness.suite.training.publication import WEIGHTS_SECONDS


def describe_step(figures: Mapping[str, float], steps: int) -> str:
    """Summarize a step and its publication in one line."""
    learn_s = figures["time/forward_s"] + figures["time/finish_s"]
    return (
        f"step {figures['global_step'] + 1:.0f}/{steps}  reward {figures['rollout/reward_mean']:.3f}"
        f"  {figures['train/micro_steps']:.0f} packs, {figures['train/trained_tokens']:,.0f} tokens"
        f"  {figures['time/step_s']:.2f} s: generate {figures['time/rollout_generate_s']:.2f}, learn {learn_s:.2f};"
        f" weights {figures[WEIGHTS_SECONDS]:.2f}"
    )

"""verl's configuration, as far as an agent loop reads it."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any


def verl_config(
    *, prompt_length: int = 64, response_length: int = 512, correction: Mapping[str, Any] | None = None, **rollout: Any
) -> SimpleNamespace:
    """That of a run with room for so many tokens; `correction` is what its loss does with the rollout's logprobs."""
    shown = SimpleNamespace(prompt_length=prompt_length, response_length=response_length, **rollout)
    algorithm = SimpleNamespace(rollout_correction=SimpleNamespace(**(correction or {"bypass_mode": False})))
    return SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=shown), algorithm=algorithm)

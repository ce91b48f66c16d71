"""verl's configuration, as far as an agent loop reads it."""

from types import SimpleNamespace
from typing import Any


def verl_config(*, prompt_length: int = 64, response_length: int = 512, **rollout: Any) -> SimpleNamespace:
    """That of a run with room for so many tokens."""
    shown = SimpleNamespace(prompt_length=prompt_length, response_length=response_length, **rollout)
    return SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=shown))

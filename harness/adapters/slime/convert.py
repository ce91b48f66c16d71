"""Columns for the trainer: slime's own, and what the proximal policy said of each token.

slime hands samples to a convert function in the place of its own columns, and makes these in a method of the actor that
calls it. So that method is called on an object which has what it reads (`READ`), and nothing else of an actor.
"""

from collections.abc import Sequence
from typing import Any

from harness.adapters.miles.convert import proximal_columns
from harness.errors import AdapterError
from harness.types import Json

METHOD = "_convert_samples_to_train_data"
READ = frozenset(
    {"args", "custom_convert_samples_to_train_data_func", "custom_reward_post_process_func", "_post_process_rewards"}
)
"""Attributes that `METHOD`, and what it calls, reads."""


def convert(args: Any, samples: Sequence[Any]) -> Json:
    """For `--custom-convert-samples-to-train-data-path`: slime's training data with the proximal columns beside it.

    Raises `AdapterError` for samples of somebody else, and for a slime that makes its columns elsewhere.
    """
    from slime.ray.rollout import RolloutManager
    from slime.utils.misc import load_function

    metadata = getattr(RolloutManager, "__ray_metadata__", None)  # of an actor: its class is behind it
    manager_class = RolloutManager if metadata is None else metadata.modified_class
    if not hasattr(manager_class, METHOD):
        raise AdapterError(f"RolloutManager has no {METHOD}; expected the interface of slime 624b824a")
    manager = object.__new__(manager_class)
    manager.args = args
    manager.custom_convert_samples_to_train_data_func = None
    path = args.custom_reward_post_process_path
    manager.custom_reward_post_process_func = None if path is None else load_function(path)
    data: Json = getattr(manager, METHOD)(list(samples))
    return data | proximal_columns(samples)

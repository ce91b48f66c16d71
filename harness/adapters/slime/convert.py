"""Training columns: slime's own, plus the proximal policy's."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from statistics import fmean, stdev
from typing import Any

from harness.adapters.miles.convert import complete_columns, proximal_columns
from harness.errors import AdapterError
from harness.types import Json

METHOD = "_convert_samples_to_train_data"
READ = frozenset(
    {"args", "custom_convert_samples_to_train_data_func", "custom_reward_post_process_func", "_post_process_rewards"}
)
"""Attributes that `METHOD` and its callees read."""
CENTERED, SCALED = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline"), ("grpo", "gspo", "cispo")
"""Advantage estimators for which slime centers and scales rewards."""


def convert(args: Any, samples: Sequence[Any]) -> Json:
    """Return slime's training data and proximal columns. Raises `AdapterError` for foreign samples."""
    from slime.ray.rollout import RolloutManager
    from slime.utils.misc import load_function

    metadata = getattr(RolloutManager, "__ray_metadata__", None)  # of an actor: its class is behind it
    manager_class = RolloutManager if metadata is None else metadata.modified_class
    if not hasattr(manager_class, METHOD):
        raise AdapterError(f"RolloutManager has no {METHOD}; expected the interface of slime 624b824a")
    complete_columns(samples)
    # slime makes its columns in a method of the calling actor, so that is called on a stand-in with the attributes in
    # `READ`. It would treat several samples per rollout as one group, so rewards are then normalized here.
    manager = object.__new__(manager_class)
    manager.args = args
    manager.custom_convert_samples_to_train_data_func = None
    path = args.custom_reward_post_process_path
    has_lists = any(sample.rollout_id is not None for sample in samples)
    ours = normalize_by_rollout if has_lists else None
    manager.custom_reward_post_process_func = ours if path is None else load_function(path)
    data: Json = getattr(manager, METHOD)(list(samples))
    return data | proximal_columns(samples)


def normalize_by_rollout(args: Any, samples: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the rewards, raw and relative to their group. Raises `AdapterError` if a rollout's samples differ."""
    raw = [sample.get_reward_value(args) for sample in samples]
    if args.advantage_estimator not in CENTERED or not args.rewards_normalization:
        return raw, raw
    groups: defaultdict[Hashable, dict[Hashable, float]] = defaultdict(dict)
    keys = [sample.index if sample.rollout_id is None else sample.rollout_id for sample in samples]
    for sample, key, reward in zip(samples, keys, raw, strict=True):
        if (shared := groups[sample.group_index].setdefault(key, reward)) != reward:
            raise AdapterError(f"rollout {key}: expected one reward for its samples, got {shared} and {reward}")
    is_scaled = args.advantage_estimator in SCALED and args.grpo_std_normalization

    def normalize(group: dict[Hashable, float], key: Hashable) -> float:
        deviation = stdev(group.values()) if is_scaled and len(group) > 1 else 0.0
        return (group[key] - fmean(group.values())) / (deviation + 1e-6 if deviation else 1.0)

    return raw, [normalize(groups[sample.group_index], key) for sample, key in zip(samples, keys, strict=True)]

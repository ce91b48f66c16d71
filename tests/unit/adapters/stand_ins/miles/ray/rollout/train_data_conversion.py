"""Columns for the trainer."""

from miles.utils.types import Sample


def convert_samples_to_train_data(
    args, samples, metadata, custom_convert_samples_to_train_data_func, custom_reward_post_process_func
):
    """Miles' own columns; the first sample decides which optional ones there are."""
    if custom_convert_samples_to_train_data_func is not None:
        return custom_convert_samples_to_train_data_func(args, samples)
    rewards = [sample.reward for sample in samples]
    shared = {}
    for sample in samples:
        key = sample.index if sample.rollout_id is None else sample.rollout_id
        if shared.setdefault(key, sample.reward) != sample.reward:
            raise ValueError(f"all samples in rollout {key!r} must share one reward")
    data = {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": rewards,
        "raw_reward": rewards,
        "truncated": [int(sample.status == Sample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "rollout_ids": [sample.index if sample.rollout_id is None else sample.rollout_id for sample in samples],
        "loss_masks": [sample.loss_mask for sample in samples],
    }
    if samples[0].rollout_log_probs is not None:
        data["rollout_log_probs"] = [sample.rollout_log_probs for sample in samples]
    if samples[0].train_metadata is not None:
        data["metadata"] = [sample.train_metadata for sample in samples]
    if any(sample.weight_versions for sample in samples):
        data["weight_versions"] = [sample.weight_versions for sample in samples]
    return data

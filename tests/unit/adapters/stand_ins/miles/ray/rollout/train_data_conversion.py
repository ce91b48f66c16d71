"""Columns for the trainer."""

from collections import Counter

from miles.utils.types import Sample


def convert_samples_to_train_data(
    args, samples, metadata, custom_convert_samples_to_train_data_func, custom_reward_post_process_func
):
    """Miles' own columns; the first sample decides which optional ones there are."""
    if custom_convert_samples_to_train_data_func is not None:
        return custom_convert_samples_to_train_data_func(args, samples)
    raw = [sample.get_reward_value(args) for sample in samples]
    rollouts = [sample.index if sample.rollout_id is None else sample.rollout_id for sample in samples]
    rewards = _normalize(samples, rollouts, raw) if args.rewards_normalization else raw
    sizes = Counter()
    for rollout, sample in zip(rollouts, samples, strict=True):
        sizes[rollout] += sum(sample.loss_mask or ())
    data = {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": rewards,
        "raw_reward": raw,
        "truncated": [int(sample.status == Sample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "rollout_ids": rollouts,
        "rollout_mask_sums": [sizes[rollout] for rollout in rollouts],
        "loss_masks": [sample.loss_mask for sample in samples],
    }
    if samples[0].rollout_log_probs is not None:
        data["rollout_log_probs"] = [sample.rollout_log_probs for sample in samples]
    if samples[0].rollout_routed_experts is not None:
        data["rollout_routed_experts"] = [sample.rollout_routed_experts for sample in samples]
    if samples[0].train_metadata is not None:
        data["metadata"] = [sample.train_metadata for sample in samples]
    if any(sample.weight_versions for sample in samples):
        data["weight_versions"] = [sample.weight_versions for sample in samples]
    return data


def _normalize(samples, rollouts, raw):
    """Rewards less the mean of their group, in which each rollout counts once."""
    groups = {}
    for sample, rollout, reward in zip(samples, rollouts, raw, strict=True):
        if groups.setdefault(sample.group_index, {}).setdefault(rollout, reward) != reward:
            raise ValueError(f"all samples in rollout {rollout!r} must share one reward")
    means = {group: sum(rewards.values()) / len(rewards) for group, rewards in groups.items()}
    return [reward - means[sample.group_index] for sample, reward in zip(samples, raw, strict=True)]

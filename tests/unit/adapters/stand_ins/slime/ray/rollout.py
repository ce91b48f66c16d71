"""What becomes of samples."""

from types import SimpleNamespace

import torch

from slime.utils.misc import load_function


class _RolloutManager:
    """Makes columns of them."""

    def __init__(self, args):
        raise RuntimeError("starts engines")

    def _post_process_rewards(self, samples):
        if self.custom_reward_post_process_func is not None:
            return self.custom_reward_post_process_func(self.args, samples)
        raw = [sample.get_reward_value(self.args) for sample in samples]
        if not self.args.rewards_normalization:
            return raw, raw
        size = self.args.n_samples_per_prompt
        if len(raw) != size * self.args.rollout_batch_size:
            size = len(raw)  # whatever group they are of
        means = [sum(raw[i : i + size]) / size for i in range(0, len(raw), size)]
        return raw, [reward - means[number // size] for number, reward in enumerate(raw)]

    def _convert_samples_to_train_data(self, samples):
        if self.custom_convert_samples_to_train_data_func is not None:
            return self.custom_convert_samples_to_train_data_func(self.args, samples)
        raw, rewards = self._post_process_rewards(samples)
        data = {
            "tokens": [sample.tokens for sample in samples],
            "response_lengths": [sample.response_length for sample in samples],
            "rewards": rewards,
            "raw_reward": raw,
            "loss_masks": [sample.loss_mask for sample in samples],
            "rollout_log_probs": [sample.rollout_log_probs for sample in samples],
        }
        if getattr(self.args, "rollout_top_p", 1.0) != 1.0:
            for sample in samples:
                assert len(sample.rollout_top_p_token_offsets) == sample.response_length + 1
                assert sample.rollout_top_p_token_offsets[-1] == len(sample.rollout_top_p_token_ids)
            for name in ("rollout_top_p_token_ids", "rollout_top_p_token_offsets"):
                data[name] = [getattr(sample, name) for sample in samples]
        if samples[0].rollout_routed_experts is not None:
            data["rollout_routed_experts"] = [torch.as_tensor(sample.rollout_routed_experts) for sample in samples]
        if samples[0].teacher_log_probs is not None:
            data["teacher_log_probs"] = [sample.teacher_log_probs for sample in samples]
        return data


class RolloutManager:
    """As Ray wraps the class of an actor."""

    __ray_metadata__ = SimpleNamespace(modified_class=_RolloutManager)


def convert_of(args, samples):
    """The columns by slime's options."""
    return load_function(args.custom_convert_samples_to_train_data_path)(args, samples)

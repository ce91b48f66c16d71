"""`ForceTokens` for vLLM: a logits processor of the entry-point group `vllm.logits_processors`.

vLLM returns logprobs of the logits before any processor, so forced tokens carry the model's own. The check of a
request's parameters does not know the vocabulary: at an id beyond it, which nobody can say, the model is on its own.
"""

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from server_patch.force_tokens.script import read_script


class ForceTokens(LogitsProcessor):  # type: ignore[misc]  # vLLM is not where this is checked
    """Allows one id only, in the rows of requests that have a script which has not ended."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise `ValueError`, answered as 400, when the script is none."""
        read_script(sampling_params.extra_args)

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        del vllm_config, device, is_pin_memory
        self._scripts: dict[int, tuple[tuple[int, ...], list[int]]] = {}
        """By row of the batch: the script, and vLLM's own list of what has been said, which grows by itself."""

    def is_argmax_invariant(self) -> bool:
        """A script says what the model finds unlikely, greedy or not."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow requests as they come, go and change rows."""
        process_dict_updates(self._scripts, batch_update, _state)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """`logits` of shape [rows, vocabulary], changed in place."""
        for row, (script, said) in self._scripts.items():
            if len(said) < len(script) and script[len(said)] < logits.shape[1]:
                logits[row] = -torch.inf
                logits[row, script[len(said)]] = 0.0
        return logits


def _state(
    params: SamplingParams, prompt_ids: list[int] | None, said: list[int]
) -> tuple[tuple[int, ...], list[int]] | None:
    del prompt_ids
    script = read_script(params.extra_args)
    return (script, said) if script else None

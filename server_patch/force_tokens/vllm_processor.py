"""`ForceTokens` for vLLM, of the entry-point group `vllm.logits_processors`.

vLLM reports logprobs from before any processor. At an id beyond the vocabulary, which validation does not know, the
model chooses.
"""

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from server_patch.force_tokens.script import read_script


class ForceTokens(LogitsProcessor):  # type: ignore[misc]  # vLLM is not where this is checked
    """Processor that allows one id only while a row's script lasts."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise `ValueError`, answered as 400, for an invalid script."""
        read_script(sampling_params.extra_args)

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._scripts: dict[int, tuple[tuple[int, ...], list[int]]] = {}
        """Script, and vLLM's own list of output ids, by row."""

    def is_argmax_invariant(self) -> bool:
        """Return False: scripts change greedy picks."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._scripts, batch_update, _state)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Change `logits` [rows, vocabulary] in place."""
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

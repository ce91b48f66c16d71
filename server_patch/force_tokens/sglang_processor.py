"""`ForceTokens` for SGLang, in a module of its own so that SGLang pickles it by name."""

from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from server_patch.force_tokens.script import PARAMETER


class ForceTokens(CustomLogitProcessor):  # type: ignore[misc]  # SGLang is not where this is checked
    """Processor that allows one id only while a row's script lasts."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Change `logits` [rows, vocabulary] in place; `custom_param_list` has one entry per row."""
        for row, parameters in enumerate(custom_param_list or []):
            script = parameters[PARAMETER]
            position = len(parameters["__req__"].output_ids)  # the scheduler's request, which SGLang puts there
            if position < len(script):
                logits[row] = -torch.inf
                logits[row, script[position]] = 0.0
        return logits

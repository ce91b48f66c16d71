"""`ForceTokens` for SGLang: a custom logit processor, in a module of its own so that it travels as a name.

SGLang sends processors to its scheduler as pickled classes; one that can be imported there is pickled by name.
Logprobs are computed from the logits that a processor returns; the plugin puts those of forced tokens right.
"""

from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from server_patch.force_tokens.script import PARAMETER


class ForceTokens(CustomLogitProcessor):  # type: ignore[misc]  # SGLang is not where this is checked
    """Allows one id only, for requests whose script has not ended."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """`logits` of shape [rows, vocabulary], changed in place; one entry of `custom_param_list` per row."""
        for row, parameters in enumerate(custom_param_list or []):
            script = parameters[PARAMETER]
            position = len(parameters["__req__"].output_ids)  # the scheduler's request, which SGLang puts there
            if position < len(script):
                logits[row] = -torch.inf
                logits[row, script[position]] = 0.0
        return logits

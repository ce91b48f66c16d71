"""SGLang plugin (group `sglang.srt.plugins`) that lets clients send `force_ids` as plain JSON.

The server needs `--enable-custom-logit-processor` and `--disable-overlap-schedule`: overlap prepares a step before the
last token is known.
"""

from typing import Any

from server_patch.force_tokens.script import read_script

_SAMPLE = "sglang.srt.layers.sampler.Sampler.forward"
_VALIDATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"


def register() -> None:
    """Register the hooks; called by SGLang in each process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_VALIDATE, _add_processor, HookType.BEFORE)
    HookRegistry.register(_SAMPLE, _keep_logprobs, HookType.AROUND)


def _add_processor(manager: Any, request: Any, *arguments: Any, **options: Any) -> None:
    del arguments, options
    sampling = getattr(request, "sampling_params", None)
    parameters = sampling.get("custom_params") if isinstance(sampling, dict) else None
    # A `ValueError` of `read_script` becomes a 400.
    if not read_script(parameters, vocab_size=manager.model_config.vocab_size):
        return
    from server_patch.force_tokens.sglang_processor import ForceTokens

    # SGLang wants a pickled processor class in each request.
    request.custom_logit_processor = request.custom_logit_processor or ForceTokens.to_str()


def _keep_logprobs(
    original: Any, sampler: Any, logits_output: Any, sampling_info: Any, *arguments: Any, **options: Any
) -> Any:
    # SGLang's next arguments: whether logprobs are wanted, and the number of alternatives per row.
    # SGLang computes logprobs from a processor's output: 0.0 for a forced token.
    return_logprob, top_counts = arguments[:2]
    rows = _forced_rows(sampling_info) if return_logprob else []
    if not rows:
        return original(sampler, logits_output, sampling_info, *arguments, **options)
    import torch
    from sglang.srt.layers.sampler import SGLANG_RETURN_ORIGINAL_LOGPROB

    logits = logits_output.next_token_logits[rows].float()
    if not (SGLANG_RETURN_ORIGINAL_LOGPROB or sampling_info.is_all_greedy):
        logits = logits / sampling_info.temperatures[rows]
    own = torch.log_softmax(logits, dim=-1)
    ids = original(sampler, logits_output, sampling_info, *arguments, **options)
    said = own.gather(1, ids[rows].long()[:, None]).squeeze(1)
    logits_output.next_token_logprobs[rows] = said.to(logits_output.next_token_logprobs.dtype)
    for row, logprobs in zip(rows, own, strict=True):
        if top_counts[row]:
            best = logprobs.topk(top_counts[row])
            logits_output.next_token_top_logprobs_val[row] = best.values
            logits_output.next_token_top_logprobs_idx[row] = best.indices
    return ids


def _forced_rows(sampling_info: Any) -> list[int]:
    told = sampling_info.custom_params if sampling_info.has_custom_logit_processor else ()
    return [
        row
        for row, parameters in enumerate(told)
        if (script := read_script(parameters)) and len(parameters["__req__"].output_ids) < len(script)
    ]

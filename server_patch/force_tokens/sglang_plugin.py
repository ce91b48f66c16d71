"""Makes `ForceTokens` work without a pickled processor in the request: a plugin of the group `sglang.srt.plugins`.

SGLang wants the processor itself in each request (`custom_logit_processor`, a pickled class as hex), besides its
parameters. This adds it to requests that have a script, where they are validated, so that a client sends plain JSON.
The server needs `--enable-custom-logit-processor`, and `--disable-overlap-schedule`: with it a step is prepared before
the token of the last one is known.

SGLang takes logprobs from what a processor returns, which for a forced token would be 0.0. Around its sampler they are
put right: those that the model gave the token before anybody forced it, on the scale of the other rows.
"""

from typing import Any

from server_patch.force_tokens.script import read_script

_SAMPLE = "sglang.srt.layers.sampler.Sampler.forward"
_VALIDATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"


def register() -> None:
    """Called by SGLang in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_VALIDATE, _add_processor, HookType.BEFORE)
    HookRegistry.register(_SAMPLE, _keep_logprobs, HookType.AROUND)


def _add_processor(manager: Any, request: Any, *arguments: Any, **options: Any) -> None:
    """Give `request` the processor when it has a script. Raises `ValueError`, answered as 400, when that is none."""
    del arguments, options
    sampling = getattr(request, "sampling_params", None)
    parameters = sampling.get("custom_params") if isinstance(sampling, dict) else None
    if not read_script(parameters, vocab_size=manager.model_config.vocab_size):
        return
    from server_patch.force_tokens.sglang_processor import ForceTokens

    request.custom_logit_processor = request.custom_logit_processor or ForceTokens.to_str()


def _keep_logprobs(
    original: Any, sampler: Any, logits_output: Any, sampling_info: Any, *arguments: Any, **options: Any
) -> Any:
    """Around `Sampler.forward`: the ids that it samples, with the model's own logprobs in the rows that are forced.

    The arguments go on with whether logprobs are wanted, and how many alternatives of each row.
    """
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
    """The rows of the batch whose next token is not the model's."""
    told = sampling_info.custom_params if sampling_info.has_custom_logit_processor else ()
    return [
        row
        for row, parameters in enumerate(told)
        if (script := read_script(parameters)) and len(parameters["__req__"].output_ids) < len(script)
    ]

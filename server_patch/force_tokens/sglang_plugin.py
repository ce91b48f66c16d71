"""Makes `ForceTokens` work without a pickled processor in the request: a plugin of the group `sglang.srt.plugins`.

SGLang wants the processor itself in each request (`custom_logit_processor`, a pickled class as hex), besides its
parameters. This adds it to requests that have a script, where they are validated, so that a client sends plain JSON.
The server needs `--enable-custom-logit-processor`.
"""

from typing import Any

from server_patch.force_tokens.script import read_script

_VALIDATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"


def register() -> None:
    """Called by SGLang in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_VALIDATE, _add_processor, HookType.BEFORE)


def _add_processor(manager: Any, request: Any, *arguments: Any, **options: Any) -> None:
    """Give `request` the processor when it has a script. Raises `ValueError`, answered as 400, when that is none."""
    del arguments, options
    sampling = getattr(request, "sampling_params", None)
    parameters = sampling.get("custom_params") if isinstance(sampling, dict) else None
    if not read_script(parameters, vocab_size=manager.model_config.vocab_size):
        return
    from server_patch.force_tokens.sglang_processor import ForceTokens

    request.custom_logit_processor = request.custom_logit_processor or ForceTokens.to_str()

"""The guard in vLLM's engine core: entry point `harness_repeat_terminate` of the group `vllm.general_plugins`.

The scheduler calls `check_stop` after every accepted token. The guard decides where vLLM would continue, and ends a
request with `finish_reason` `repetition` and `stop_reason` `repeat_terminate`. No token is forced. Stop strings are
matched later, in the API server. Fits vLLM 0.32.
"""

from typing import Any

from server_patch.repeat_terminate.attach import Guard, attach_guard, learning_object_keys, wrap
from server_patch.repeat_terminate.signals import MARK, probe_answer


def register() -> None:
    """Attach the guard; called by vLLM in each process."""
    attach_guard("vLLM", _patch)


def _patch(guard: Guard) -> None:
    from vllm.v1.core.sched import scheduler
    from vllm.v1.request import RequestStatus

    # The name in `scheduler` is the one that is called; `sched.utils` only defines it.
    wrap(scheduler, "check_stop", StopHook(guard, RequestStatus.FINISHED_REPETITION))
    if guard.config.max_object_keys is not None:
        wrap(scheduler.Scheduler, "__init__", learning_object_keys(guard, _tokenizer_of))


class StopHook:
    """Wrapper of `check_stop`."""

    def __init__(self, guard: Guard, repetition: Any) -> None:
        self._guard = guard
        self._repetition = repetition

    def __call__(self, original: Any, request: Any, *args: Any, **kwargs: Any) -> bool:
        watch = self._guard.watch_of(request, request.prompt_token_ids, request.sampling_params.extra_args)
        if watch.is_probe:
            return self._end(request, probe_answer(self._guard.digest))
        if original(request, *args, **kwargs):
            return True
        return watch.hit(request.output_token_ids) is not None and self._end(request, MARK)

    def _end(self, request: Any, reason: str) -> bool:
        request.status = self._repetition
        request.stop_reason = reason
        return True


def _tokenizer_of(scheduler: Any) -> Any:
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(scheduler.vllm_config.model_config)

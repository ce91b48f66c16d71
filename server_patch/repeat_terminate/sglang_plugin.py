"""The guard in SGLang's scheduler: entry point `harness_repeat_terminate` of the group `sglang.srt.plugins`.

Checks the output after `Req.update_finish_state`, which runs on every tensor-parallel rank. Aborts and earlier ends
stand. Else the request ends with `type` `length`, which any client reads as truncated. No token is forced. Finish
reasons of watched requests carry `repeat_terminate` 0 or 1; beam search is not watched. Fits SGLang 0.5.23.
"""

from operator import attrgetter
from typing import Any

from server_patch.repeat_terminate.attach import Guard, NotAttached, attach_guard, learning_object_keys, wrap
from server_patch.repeat_terminate.signals import MARK, PROBE, SGLANG_MATCHED


def register() -> None:
    """Attach the guard; called by SGLang in each process."""
    attach_guard("SGLang", _patch)


def _patch(guard: Guard) -> None:
    from sglang.srt.managers import schedule_batch

    reasons = schedule_batch.BaseFinishReason.__subclasses__()
    if not reasons:
        raise NotAttached("BaseFinishReason has no subclasses")
    for reason in reasons:
        wrap(reason, "to_json", marked)
    wrap(schedule_batch.Req, "update_finish_state", FinishHook(guard, schedule_batch))
    if guard.config.max_object_keys is not None:
        from sglang.srt.managers.scheduler import Scheduler

        wrap(Scheduler, "__init__", learning_object_keys(guard, attrgetter("tokenizer")))


class FinishHook:
    """Wrapper of `Req.update_finish_state`."""

    def __init__(self, guard: Guard, schedule_batch: Any) -> None:
        self._guard = guard
        self._length = schedule_batch.FINISH_LENGTH
        self._abort = schedule_batch.FINISH_ABORT

    def __call__(self, original: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        if request.finished_reason is None:
            original(request, *args, **kwargs)
            self._decide(request)

    def _decide(self, request: Any) -> None:
        watch = self._guard.watch_of(request, request.origin_input_ids, request.sampling_params.custom_params)
        hit = watch.hit(request.output_ids)
        if hit is not None and self._comes_first(hit, request):
            self._end(request, hit, {MARK: 1, "matched": SGLANG_MATCHED})
        elif watch.is_probe and request.output_ids:
            self._end(request, 1, {MARK: 0, PROBE: self._guard.digest})
        elif request.finished_reason is not None:
            setattr(request.finished_reason, MARK, {MARK: 0})

    def _comes_first(self, hit: int, request: Any) -> bool:
        # An end of SGLang's own at a later token of the same step loses to the guard.
        if request.finished_reason is None:
            return True
        end = len(request.output_ids) if request.finished_len is None else request.finished_len
        return hit < end and not isinstance(request.finished_reason, self._abort)

    def _end(self, request: Any, length: int, marks: dict[str, Any]) -> None:
        request.finished_reason = self._length(length=length)
        request.finished_len = length
        setattr(request.finished_reason, MARK, marks)


def marked(original: Any, reason: Any) -> dict[str, Any]:
    told: dict[str, Any] = original(reason)
    return told | getattr(reason, MARK, {})

"""The words by which the guard and those who talk to its server understand each other.

A request needs none of them: the guard watches every request of its server. Two arguments are understood beside it,
in SGLang's `sampling_params.custom_params`, in vLLM's `sampling_params.extra_args` (`vllm_xargs` on its OpenAI routes):

- `repeat_prefix_len`: the last n prompt ids were generated before (a continuation), so they count as generated;
- `repeat_probe`: end at the first token and say which configuration the guard runs.

SGLang answers in `finish_reason`: `repeat_terminate` 0 or 1 on every sequence that the guard has watched, and
`repeat_probe`. vLLM has no room beside its own finish and stop reasons: it answers finish reason `repetition` with stop
reason `repeat_terminate`, and `repeat_terminate:<digest>` to a probe.
"""

from collections.abc import Mapping

MARK = "repeat_terminate"
"""Names the guard: the key of the 0 or 1 in SGLang, the stop reason in vLLM."""

PREFIX_LENGTH = "repeat_prefix_len"
PROBE = "repeat_probe"

SGLANG_MATCHED = f"\0{MARK}"
"""`matched_stop` of SGLang's OpenAI routes, which cut a text where this stands in it; hence the NUL."""

VLLM_FINISH = "repetition"
"""vLLM's finish reason; the stop reason tells the guard from vLLM's own detection."""


def probe_answer(digest: str) -> str:
    """VLLM's stop reason for a probe."""
    return f"{MARK}:{digest}"


def probed_digest(stop_reason: object) -> str | None:
    """The digest in a stop reason, None when it is no answer to a probe."""
    mark, _, digest = stop_reason.partition(":") if isinstance(stop_reason, str) else ("", "", "")
    return digest if mark == MARK and digest else None


def prefix_length(arguments: object, prompt_length: int) -> int:
    """How many prompt ids count as generated. Bounded by the prompt; anything that is no integer counts as none.

    A bad value must not end the scheduler that reads it, and with it every other request.
    """
    stated = arguments.get(PREFIX_LENGTH) if isinstance(arguments, Mapping) else None
    return min(max(stated, 0), prompt_length) if isinstance(stated, int) else 0


def is_probe(arguments: object) -> bool:
    """The request asks which configuration the guard runs."""
    return isinstance(arguments, Mapping) and bool(arguments.get(PROBE))

"""The guard's protocol with clients of its server. Every request is watched.

Optional arguments, in SGLang's `sampling_params.custom_params` or vLLM's `sampling_params.extra_args` (`vllm_xargs` on
OpenAI routes): `repeat_prefix_len`, prompt ids at the end that count as generated, and `repeat_probe`, end at the first
token and report the configuration. SGLang answers in `finish_reason`, with `repeat_terminate` 0 or 1 and
`repeat_probe`. vLLM answers finish reason `repetition` and stop reason `repeat_terminate`, or
`repeat_terminate:<digest>` to a probe.
"""

from collections.abc import Mapping
from typing import Any

MARK = "repeat_terminate"
"""SGLang's key of the 0 or 1, vLLM's stop reason."""

PREFIX_LENGTH = "repeat_prefix_len"
PROBE = "repeat_probe"

SGLANG_MATCHED = f"\0{MARK}"
"""`matched_stop` on SGLang's OpenAI routes, which cut the text at it; so it has a NUL."""

VLLM_FINISH = "repetition"
"""Finish reason in vLLM, shared with its own detection."""


def probe_answer(digest: str) -> str:
    return f"{MARK}:{digest}"


def probed_digest(stop_reason: object) -> str | None:
    """Extract the digest from a stop reason, or None."""
    mark, _, digest = stop_reason.partition(":") if isinstance(stop_reason, str) else ("", "", "")
    return digest if mark == MARK and digest else None


def prefix_length(arguments: object, prompt_length: int) -> int:
    """Return how many prompt ids count as generated."""
    # A bad value must not end the scheduler that reads it, and with it every other request.
    stated = arguments.get(PREFIX_LENGTH) if isinstance(arguments, Mapping) else None
    return min(max(stated, 0), prompt_length) if isinstance(stated, int) else 0


def is_probe(arguments: object) -> bool:
    return isinstance(arguments, Mapping) and bool(arguments.get(PROBE))


def signal(*, triggered: bool) -> dict[str, Any]:
    """Return what stands beside a response: `{"harness": {"repeat_terminate_triggered": 0|1}}`."""
    return {"harness": {"repeat_terminate_triggered": int(triggered)}}

"""The repeat guard's signal for clients of the router.

    /v1/chat/completions, /v1/completions
        one more key: `"harness": {"repeat_terminate_triggered": 1}`
    these and /generate, with `x-harness-wrapped: 1`
        `{"response": ..., "harness": {...}}`; a batch has a list of signals

Only routers with a proven guard add it, so 0 means watched and not ended. Streams pass untouched.
"""

import json
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from server_patch.repeat_terminate.signals import MARK, SGLANG_MATCHED, VLLM_FINISH, signal

WRAPPED_HEADER = "x-harness-wrapped"

_CHOICES = ("/v1/chat/completions", "/v1/completions")
_TOKENS = "/generate"


def amendment(scope: Scope) -> Callable[[bytes], bytes] | None:
    """Return the function that amends a whole answer."""
    if scope["method"] != "POST" or scope["path"] not in (*_CHOICES, _TOKENS):
        return None
    if Headers(scope=scope).get(WRAPPED_HEADER) == "1":
        return wrapped_bytes
    return with_signal_bytes if scope["path"] in _CHOICES else None


def with_signal_bytes(content: bytes) -> bytes:
    """Append the signal to an answer with choices, without re-encoding it."""
    answer = _decoded(content)
    if not isinstance(answer, dict) or not answer.get("choices"):
        return content
    return content.rstrip()[:-1] + b"," + json.dumps(signal(triggered=is_triggered(answer)))[1:].encode()


def wrapped_bytes(content: bytes) -> bytes:
    """Wrap an answer; a batch has a list of signals."""
    answer = _decoded(content)
    if isinstance(answer, list):
        signals: Any = [signal(triggered=is_triggered(each))["harness"] for each in answer]
    elif isinstance(answer, dict):
        signals = signal(triggered=is_triggered(answer))["harness"]
    else:
        return content
    return b'{"response":' + content + b',"harness":' + json.dumps(signals).encode() + b"}"


def is_triggered(answer: Any) -> bool:
    if not isinstance(answer, dict):
        return False
    if isinstance(choices := answer.get("choices"), list):
        return any(_ended_choice(choice) for choice in choices if isinstance(choice, dict))
    meta = answer.get("meta_info")
    finish = meta.get("finish_reason") if isinstance(meta, dict) else None
    return isinstance(finish, dict) and bool(finish.get(MARK))


def _ended_choice(choice: dict[str, Any]) -> bool:
    by_vllm = choice.get("finish_reason") == VLLM_FINISH and choice.get("stop_reason") == MARK
    return by_vllm or choice.get("matched_stop") == SGLANG_MATCHED


def _decoded(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None

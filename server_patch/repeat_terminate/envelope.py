"""How the guard's signal travels beside a response: an additive key, or a wrapped form for batch endpoints.

Pure. The signal is handed in, 0 or 1 per sequence; it is never guessed from the response.
"""

from collections.abc import Mapping
from typing import Any

HARNESS_KEY = "harness"
TRIGGERED_KEY = "repeat_terminate_triggered"


def signal(*, triggered: bool) -> dict[str, Any]:
    """`{"harness": {"repeat_terminate_triggered": 0|1}}`."""
    return {HARNESS_KEY: {TRIGGERED_KEY: int(triggered)}}


def with_signal(response: Mapping[str, Any], *, triggered: bool) -> dict[str, Any]:
    """`response` with the signal as one more key; clients that do not know the key read it as before."""
    return {**response, **signal(triggered=triggered)}


def wrapped(response: Mapping[str, Any], *, triggered: bool) -> dict[str, Any]:
    """`{"response": {...}, "harness": {...}}`: the response untouched, the signal beside it."""
    return {"response": dict(response), **signal(triggered=triggered)}


def triggered_in(body: Mapping[str, Any]) -> bool | None:
    """The signal in either form; None when there is none, which is what a server without the guard answers."""
    stated = body.get(HARNESS_KEY)
    value = stated.get(TRIGGERED_KEY) if isinstance(stated, Mapping) else None
    return None if value is None else bool(value)

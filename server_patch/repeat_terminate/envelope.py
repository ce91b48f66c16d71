"""The guard's signal beside a response. Pure."""

from collections.abc import Mapping
from typing import Any

HARNESS_KEY = "harness"
TRIGGERED_KEY = "repeat_terminate_triggered"


def signal(*, triggered: bool) -> dict[str, Any]:
    """Return `{"harness": {"repeat_terminate_triggered": 0|1}}`."""
    return {HARNESS_KEY: {TRIGGERED_KEY: int(triggered)}}


def with_signal(response: Mapping[str, Any], *, triggered: bool) -> dict[str, Any]:
    """Add the signal as one more key."""
    return {**response, **signal(triggered=triggered)}


def wrapped(response: Mapping[str, Any], *, triggered: bool) -> dict[str, Any]:
    """Return `{"response": {...}, "harness": {...}}`."""
    return {"response": dict(response), **signal(triggered=triggered)}


def triggered_in(body: Mapping[str, Any]) -> bool | None:
    """Return the signal in either form, None without."""
    stated = body.get(HARNESS_KEY)
    value = stated.get(TRIGGERED_KEY) if isinstance(stated, Mapping) else None
    return None if value is None else bool(value)

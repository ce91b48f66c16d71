"""Sampling parameters of trainers, in SGLang's names, as a session's. Pure."""

from collections.abc import Callable, Mapping
from typing import Any

from harness.errors import AdapterError
from harness.types import Json, Sample


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


NAMES: Mapping[str, str] = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids")},
}
"""Session's names, by SGLang's."""

_CONVERTERS: Mapping[str, Callable[[Any], Any]] = {
    "top_k": lambda value: max(0, value),  # -1 keeps every token, which is 0 here
    "stop": _as_list,
    "stop_token_ids": _as_list,
}

ABOUT_TEXT = frozenset({"skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"})
"""Parameters of SGLang's text output, which sessions decode themselves."""

FILTERS: Mapping[str, Callable[[Any], bool]] = {
    "top_p": lambda value: value < 1,
    "top_k": lambda value: value > 0,
    "min_p": lambda value: value > 0,
}
"""Parameters that filter tokens, and when."""

FILTERED = "the loss takes ratios to rollout logprobs, and they are of the unfiltered distribution"


def is_filter(name: str, value: Any) -> bool:
    """Return True if the parameter filters tokens."""
    return value is not None and FILTERS[name](value)


def require_unfiltered(params: Mapping[str, Any], owner: str) -> None:
    """Raise `AdapterError` naming the first parameter that filters tokens."""
    for name in FILTERS:
        if is_filter(name, params.get(name)):
            raise AdapterError(f"{owner}{name}={params[name]!r} is not supported: {FILTERED}")


def require_no_masks(sample: Sample, trainer: str) -> None:
    """Raise `AdapterError` for a sample whose logprobs the trainer cannot find again."""
    if sample.sampling_mask is not None:
        raise AdapterError(
            f"record: expected no sampling_mask in sessions for {trainer}, which normalizes over the whole vocabulary"
        )


def require_no_teachers(sample: Sample, trainer: str) -> None:
    """Raise `AdapterError` for a sample with scores that the trainer has no column for."""
    if sample.teachers:
        raise AdapterError(
            f"teachers: expected none in sessions for {trainer}, which asks its own; create them with teachers=[]"
        )


def session_sampling(params: Mapping[str, Any]) -> Json:
    """Convert to a session's `sampling`. Raises `AdapterError`."""
    sampling: Json = {}
    for name, value in params.items():
        if value is None or name in ABOUT_TEXT:
            continue
        if name not in NAMES:
            raise AdapterError(f"sampling parameter {name!r} is not supported; expected some of {', '.join(NAMES)}")
        sampling[NAMES[name]] = _CONVERTERS[name](value) if name in _CONVERTERS else value
    return sampling

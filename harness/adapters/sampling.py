"""The sampling parameters of trainers, which are named as SGLang names them, as those of a session. Pure."""

from collections.abc import Callable, Mapping
from typing import Any

from harness.errors import AdapterError
from harness.types import Json


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _same(value: Any) -> Any:
    return value


NAMES: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "max_new_tokens": ("max_tokens", _same),
    "min_new_tokens": ("min_tokens", _same),
    "temperature": ("temperature", _same),
    "top_p": ("top_p", _same),
    "top_k": ("top_k", lambda value: max(0, value)),  # -1 keeps every token, which is 0 here
    "min_p": ("min_p", _same),
    "stop": ("stop", _as_list),
    "stop_token_ids": ("stop_token_ids", _as_list),
    "sampling_seed": ("seed", _same),
}
"""By SGLang's name: the session's name, and the value there."""

ABOUT_TEXT = frozenset({"skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"})
"""They say how SGLang writes text. A session keeps the tokens, all of them, and reads them itself."""

FILTERS: Mapping[str, Callable[[Any], bool]] = {
    "top_p": lambda value: value < 1,
    "top_k": lambda value: value > 0,
    "min_p": lambda value: value > 0,
}
"""Parameters that keep tokens from being sampled, by SGLang's name, and the values with which they do."""

FILTERED = "the loss takes ratios to rollout logprobs, and they are those of the unfiltered distribution"


def is_filter(name: str, value: Any) -> bool:
    """Whether the parameter `name` keeps tokens from being sampled; None is a value that nobody has set."""
    return value is not None and FILTERS[name](value)


def require_unfiltered(params: Mapping[str, Any], owner: str) -> None:
    """Raise `AdapterError` naming the first of `params` that keeps tokens from being sampled, as one of `owner`."""
    for name in FILTERS:
        if is_filter(name, params.get(name)):
            raise AdapterError(f"{owner}{name}={params[name]!r} cannot be kept: {FILTERED}")


def session_sampling(params: Mapping[str, Any]) -> Json:
    """The `sampling` of a session by these parameters. Raises `AdapterError` for one that sessions do not know."""
    sampling: Json = {}
    for name, value in params.items():
        if value is None or name in ABOUT_TEXT:
            continue
        if name not in NAMES:
            raise AdapterError(f"sampling parameter {name!r} cannot be kept; expected some of {', '.join(NAMES)}")
        ours, convert = NAMES[name]
        sampling[ours] = convert(value)
    return sampling

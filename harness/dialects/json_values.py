"""How much free-form JSON of others is taken as it comes: tool schemas, metadata.

Encoders, templates and databases further in recurse into such values and hold integers in 64 bits. What would break
one of them is refused here, where the field can still be named.
"""

from collections.abc import Iterable
from typing import Any

from harness.errors import MalformedRequest

_DEEPEST = 64
_INTEGERS = range(-(2**63), 2**64)


def check_json(value: Any, param: str) -> None:
    """Raises `MalformedRequest` naming `param` when `value` is nested too deeply or holds an integer beyond 64 bits."""
    level = [value]
    for _ in range(_DEEPEST):
        if any(type(each) is int and each not in _INTEGERS for each in level):
            raise MalformedRequest(f"{param}: an integer in it does not fit into 64 bits", param=param)
        level = [child for each in level for child in _children(each)]
        if not level:
            return
    raise MalformedRequest(f"{param}: it is nested more than {_DEEPEST} levels deep", param=param)


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()

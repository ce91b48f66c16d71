"""Attach the guard to an engine process, or end the process: a server never only seems guarded.

Every process of a server calls `attach_guard` at its start. Without `HARNESS_REPEAT_TERMINATE_ENABLE=1` it does
nothing.
"""

import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

from server_patch.repeat_terminate.config import OBJECT_KEY_TEXT, ConfigError, RepeatTerminateConfig
from server_patch.repeat_terminate.watch import Guard

_ATTACHED = "_harness_repeat_terminate"


class NotAttached(Exception):
    """The engine lacks what the guard patches."""


def attach_guard(engine: str, patch: Callable[[Guard], None]) -> None:
    """Run `patch` with this process's guard; exit on failure."""
    try:
        config = RepeatTerminateConfig.from_environ(os.environ)
        if config is not None:
            patch(Guard(config, config.digest()))
            sys.stderr.write(f"repeat guard: attached to {engine} in process {os.getpid()}, {config.digest()[:12]}\n")
    except ConfigError as error:
        _refuse(f"its configuration is wrong: {error}")
    except (NotAttached, ImportError) as error:
        _refuse(f"this {engine} cannot be guarded: {error}; use the {engine} version named in docs/repeat-guard.md")


# Patches are set directly: an engine's hook registry applies hooks later and only logs failures.
def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace `owner.name` by `around(original, *args)`, once. Raises `NotAttached`."""
    original = vars(owner).get(name)
    where = f"{getattr(owner, '__module__', None) or ''}.{getattr(owner, '__qualname__', owner.__name__)}.{name}"
    if not callable(original):
        raise NotAttached(f"there is no function {where.lstrip('.')}")
    if hasattr(original, _ATTACHED):
        return

    @wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(wrapper, _ATTACHED, True)
    setattr(owner, name, wrapper)
    if vars(owner).get(name) is not wrapper:
        raise NotAttached(f"{where.lstrip('.')} did not take the patch")


def learning_object_keys(guard: Guard, tokenizer_of: Callable[[Any], Any]) -> Callable[..., None]:
    """Return a wrapper of a scheduler's `__init__` that encodes the object key, and exits without a tokenizer."""

    def learning(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        original(scheduler, *args, **kwargs)
        tokenizer = tokenizer_of(scheduler)
        if tokenizer is None:
            _refuse("max_object_keys needs the server's tokenizer, and this server runs without one; set it to null")
        guard.object_key_ids = tokenizer.encode(OBJECT_KEY_TEXT, add_special_tokens=False)

    return learning


def _refuse(reason: str) -> NoReturn:
    # No `Exception`: SGLang logs a plugin's and continues.
    raise SystemExit(
        f"repeat guard: enabled, but {reason}. Nothing is served; set HARNESS_REPEAT_TERMINATE_ENABLE=0 to serve"
        " without the guard"
    )

"""Puts the guard into the process of an engine, or ends that process: never a server that only seems guarded.

Every process of a server calls `attach_guard` while it starts. Without `HARNESS_REPEAT_TERMINATE_ENABLE=1` nothing
happens. With it, a bad configuration, a missing hook target or a patch that did not take is `SystemExit` with one line
that says what to do: SGLang logs any `Exception` of a plugin and goes on without it.

A patch is set on the attribute and read back. It does not go through an engine's own hook registry, which applies
hooks later, and only logs the ones it could not apply.
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
    """The engine is not the one that the guard was written for; the message names what is missing."""


def attach_guard(engine: str, patch: Callable[[Guard], None]) -> None:
    """Run `patch` with the guard of this process's environment; any failure ends the process."""
    try:
        config = RepeatTerminateConfig.from_environ(os.environ)
        if config is not None:
            patch(Guard(config, config.digest()))
            sys.stderr.write(f"repeat guard: attached to {engine} in process {os.getpid()}, {config.digest()[:12]}\n")
    except ConfigError as error:
        _refuse(f"its configuration is wrong: {error}")
    except (NotAttached, ImportError) as error:
        _refuse(f"this {engine} cannot be guarded: {error}; use the {engine} version named in docs/repeat-guard.md")


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Let `around(original, *args)` answer for `owner.name`; a second time changes nothing. Raises `NotAttached`."""
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


def learn_object_keys(guard: Guard, tokenizer: Any) -> None:
    """Encode what `max_object_keys` counts with the server's own tokenizer; without one the process ends."""
    if tokenizer is None:
        _refuse("max_object_keys needs the server's tokenizer, and this server runs without one; set it to null")
    guard.object_key_ids = tokenizer.encode(OBJECT_KEY_TEXT, add_special_tokens=False)


def _refuse(reason: str) -> NoReturn:
    raise SystemExit(
        f"repeat guard: enabled, but {reason}. Nothing is served; set HARNESS_REPEAT_TERMINATE_ENABLE=0 to serve"
        " without the guard"
    )

"""The guard inside an engine process: attached at its start, it has one `Watch` per request.

Every process of a server calls `attach_guard` at its start. It attaches the guard, or ends the process: a server never
only seems guarded. Without `HARNESS_REPEAT_TERMINATE_ENABLE=1` it does nothing. A watch is shown the output after every
step and counts what it has seen, so speculative decoding and preemption neither skip nor repeat a token.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, NoReturn

from server_patch.repeat_terminate.config import OBJECT_KEY_TEXT, ConfigError, RepeatTerminateConfig
from server_patch.repeat_terminate.detector import RepeatDetector
from server_patch.repeat_terminate.signals import MARK, is_probe, prefix_length

_ATTACHED = "_harness_repeat_terminate"


@dataclass
class Guard:
    config: RepeatTerminateConfig
    digest: str
    object_key_ids: Sequence[int] | None = None
    """Ids of the object key, once the tokenizer is loaded."""

    def watch(self, prompt_ids: Sequence[int] | None, arguments: object) -> "Watch":
        prompt = prompt_ids or ()
        length = prefix_length(arguments, len(prompt))
        return Watch(self, prompt[len(prompt) - length :], is_probe=is_probe(arguments))

    def watch_of(self, request: Any, prompt_ids: Sequence[int] | None, arguments: object) -> "Watch":
        """Return the watch of an engine's `request`, which keeps it."""
        if not hasattr(request, MARK):
            setattr(request, MARK, self.watch(prompt_ids, arguments))
        watch: Watch = getattr(request, MARK)
        return watch


class Watch:
    __slots__ = ("_guard", "_hit", "_prefix", "_push", "_seen", "is_probe")

    def __init__(self, guard: Guard, prefix: Sequence[int], *, is_probe: bool) -> None:
        self._guard = guard
        self._prefix = prefix
        self.is_probe = is_probe
        self._push = self._detector().push
        self._seen = 0
        self._hit: int | None = None

    def hit(self, output_ids: Sequence[int]) -> int | None:
        """Return the output length at the triggering token, or None."""
        size = len(output_ids)
        if size < self._seen:  # the engine discarded output, for a session's next turn or a recomputation
            self._push, self._seen, self._hit = self._detector().push, 0, None
        while self._seen < size and self._hit is None:
            token = output_ids[self._seen]
            self._seen += 1
            if self._push(token):
                self._hit = self._seen
        return self._hit

    def _detector(self) -> RepeatDetector:
        detector = RepeatDetector(self._guard.config, self._guard.object_key_ids)
        detector.seed(self._prefix)
        return detector


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

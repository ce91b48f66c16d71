"""Questions to an installation: all asked at once, each for a bounded time, and what they make is gone afterwards.

A probe has a thread, because what it asks may hang in the operating system (a cache on a file server that is down), and
nothing ends that. It is left behind then; the command ends without it.
"""

import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

_REMOVAL_S = 1.0


class Level(StrEnum):
    """How a thing stands."""

    OK = "ok"
    """As it should be, or not there and not needed."""
    WARN = "warn"
    """Something that people stumble over: part of the harness will not work here, or not as expected."""
    FAIL = "fail"
    """Hardly anything works as long as it is so."""


class Finding(NamedTuple):
    """One thing that was looked at."""

    check: str
    level: Level
    found: str
    next_step: str = ""


class Scratch:
    """Folders of probes, removed all together: also those of probes that nobody waits for any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # no folder is made once they are being removed
        self._folders: list[Path] = []
        self._is_over = False

    def make(self, parent: Path | None = None) -> Path:
        """A new folder in `parent`, by default where temporary files are. Raises `OSError`."""
        with self._lock:
            if self._is_over:
                raise TimeoutError("nobody waits for it any more")
            folder = Path(tempfile.mkdtemp(prefix=".harness-doctor-", dir=parent))
            self._folders.append(folder)
            return folder

    def remove(self) -> None:
        """Remove the folders, and have no others made; a file system that hangs is not waited for."""
        removing = threading.Thread(target=self._remove, daemon=True)
        removing.start()
        removing.join(_REMOVAL_S)

    def _remove(self) -> None:
        with self._lock:
            self._is_over = True
            for folder in self._folders:
                gone = folder.with_name(f"{folder.name}-{secrets.token_hex(4)}")  # a probe at work finds it no more
                with suppress(OSError):  # it is gone already, or cannot be changed any more
                    folder.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)


Probe = Callable[[Scratch], list[Finding]]
"""Looks at something, and says what it found."""


def ask_all(probes: Mapping[str, Probe], deadline_s: float) -> list[Finding]:
    """The findings of all `probes`, in their order, at most `deadline_s` later.

    A probe that has not come to its end, or raises, is a finding under its name. Everything made in their scratch is
    removed, also when the wait is interrupted.
    """
    scratch = Scratch()
    found: dict[str, list[Finding]] = {}

    def ask(name: str, probe: Probe) -> None:
        try:
            found[name] = probe(scratch)
        except Exception as error:  # noqa: BLE001  # of whatever is broken here: that is the question
            found[name] = [Finding(name, Level.FAIL, f"{type(error).__name__}: {error}")]

    try:
        until = time.monotonic() + deadline_s
        threads = [threading.Thread(target=ask, args=item, daemon=True, name=item[0]) for item in probes.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
    finally:
        scratch.remove()
    late, step = f"no answer within {deadline_s:g} s", "a file server or a device hangs; mend it, and ask again"
    return [each for name in probes for each in found.get(name, [Finding(name, Level.WARN, late, step)])]

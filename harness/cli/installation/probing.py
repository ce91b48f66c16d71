"""Probes of an installation, run all at once with a time limit and without leaving anything behind.

Each runs in a thread, because it may hang in the operating system (a cache on a dead file server). The command then
ends without it.
"""

import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from harness.machine.findings import Finding, Level

_REMOVAL_S = 1.0


class Scratch:
    """Folders of probes, removed together, late probes' included."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # no folder is created once removal has begun
        self._folders: list[Path] = []
        self._is_over = False

    def make(self, parent: Path | None = None) -> Path:
        """Create a folder in `parent`, by default in the temporary directory. Raises `OSError`."""
        with self._lock:
            if self._is_over:
                raise TimeoutError("its caller has stopped waiting")
            folder = Path(tempfile.mkdtemp(prefix=".harness-doctor-", dir=parent))
            self._folders.append(folder)
            return folder

    def remove(self) -> None:
        """Remove the folders and refuse new ones, without waiting for a hanging file system."""
        removing = threading.Thread(target=self._remove, daemon=True)
        removing.start()
        removing.join(_REMOVAL_S)

    def _remove(self) -> None:
        with self._lock:
            self._is_over = True
            for folder in self._folders:
                gone = folder.with_name(
                    f"{folder.name}-{secrets.token_hex(4)}"
                )  # so that a running probe no longer finds it
                with suppress(OSError):  # already gone, or read-only by now
                    folder.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)


Probe = Callable[[Scratch], list[Finding]]


def ask_all(probes: Mapping[str, Probe], deadline_s: float) -> list[Finding]:
    """Return the findings of all `probes`, in order, within `deadline_s`.

    A probe that is late or raises becomes a finding. Scratch folders are removed even after an interrupt.
    """
    scratch = Scratch()
    found: dict[str, list[Finding]] = {}

    def ask(name: str, probe: Probe) -> None:
        try:
            found[name] = probe(scratch)
        except Exception as error:  # noqa: BLE001  # any error is a finding
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
    late, step = (
        f"no answer within {deadline_s:g} s",
        "the machine is busy, or a file system or device hangs: try again",
    )
    return [each for name in probes for each in found.get(name, [Finding(name, Level.WARN, late, step)])]

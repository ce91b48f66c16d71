"""Progress of fetching weights: a bar on a terminal, a line per phase elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from harness.lab.models import FetchPhase, FetchProgress, resolve_model

_WORDS = {
    FetchPhase.WAIT: "waiting for another process that fetches",
    FetchPhase.VERIFY: "verifying",
    FetchPhase.DOWNLOAD: "downloading",
    FetchPhase.EXTRACT: "extracting",
    FetchPhase.CONVERT: "converting",
}


class _Bar:
    def __init__(self, bars: Progress, name: str) -> None:
        self._bars = bars
        self._name = name
        self._tasks: dict[FetchPhase, TaskID] = {}

    def __call__(self, phase: FetchPhase, done: int, total: int) -> None:
        if phase not in self._tasks:
            self._tasks[phase] = self._bars.add_task(f"{_WORDS[phase]} {self._name}", total=None)
        self._bars.update(self._tasks[phase], completed=done, total=total or None)


class _PhaseLines:
    """A line per phase, except for verifying cached files."""

    def __init__(self, console: Console, name: str) -> None:
        self._console = console
        self._name = name
        self._seen = {FetchPhase.VERIFY}

    def __call__(self, phase: FetchPhase, done: int, total: int) -> None:
        if phase not in self._seen:
            self._seen.add(phase)
            self._console.print(f"{_WORDS[phase]} {self._name}")


@contextmanager
def open_download_progress(name: str) -> Iterator[FetchProgress]:
    """Yield a progress for `get_model`, drawn on standard error."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        yield _PhaseLines(console, name)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        yield _Bar(bars, name)


def fetch(model: str) -> Path:
    """Return the folder of a catalogue name, folder or hub id, with a progress bar while it is fetched."""
    with open_download_progress(model) as progress:
        return resolve_model(model, progress=progress)

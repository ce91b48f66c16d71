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


@contextmanager
def open_download_progress(name: str) -> Iterator[FetchProgress]:
    """Yield a progress for `get_model`, drawn on standard error."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    tasks: dict[FetchPhase, TaskID] = {}
    said = {FetchPhase.VERIFY}  # not worth a line where there is no bar

    def draw(phase: FetchPhase, done: int, total: int) -> None:
        if phase not in tasks:
            tasks[phase] = bars.add_task(f"{_WORDS[phase]} {name}", total=None)
        bars.update(tasks[phase], completed=done, total=total or None)

    def tell(phase: FetchPhase, done: int, total: int) -> None:
        del done, total
        if phase not in said:
            said.add(phase)
            console.print(f"{_WORDS[phase]} {name}")

    if not console.is_terminal:
        yield tell
        return
    with Progress(*columns, console=console, transient=True) as bars:
        yield draw


def fetch(model: str) -> Path:
    """Return the folder of a catalogue name, folder or hub id, with a progress bar while it is fetched."""
    with open_download_progress(model) as progress:
        return resolve_model(model, progress=progress)

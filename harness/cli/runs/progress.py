"""A run while it runs, on standard error: a line per rollout, and a live bar below them on a terminal."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from harness.errors import Cause
from harness.suite.record.rollout_table import RolloutRecord
from harness.suite.scenarios.plan import PlannedRollout
from harness.telemetry.printable import printable


class RunProgress:
    """Implements `harness.suite.run.batch.Progress`; `bar` is None where nothing can be redrawn."""

    def __init__(self, console: Console, bar: Progress | None, *, is_resumed: bool) -> None:
        self._console = console
        self._bar = bar
        self._task: TaskID | None = None
        self._is_resumed = is_resumed
        self._total = self._ended = self._running = 0

    def say(self, text: str) -> None:
        """A line in the user's words."""
        self._console.print(escape(text), style="dim")

    def begin(self, total: int, done: int) -> None:
        """Begin the count; a run that is taken up says where it stopped."""
        self._total, self._ended = total, done
        if self._is_resumed:
            self.say(f"run was interrupted: {done} of {total} rollouts finished, {total - done} to run")
        if self._bar is not None:
            self._task = self._bar.add_task("", total=total, completed=done)

    def begin_rollout(self, rollout: PlannedRollout) -> None:
        """One more at work."""
        del rollout
        self._running += 1
        self._redraw()

    def end_rollout(self, record: RolloutRecord) -> None:
        """One line for the rollout; an error is said in full."""
        self._running -= 1
        self._ended += 1
        self._redraw()
        facts = [f"{record.session.turns} turns", f"{record.session.ledger.generated} tokens"]
        if record.reward is not None:
            facts.append(f"reward {record.reward:.2f}")
        facts.append(f"{record.seconds:.1f} s")
        why = f" ({record.cause.value}: {printable(record.detail)})" if record.cause not in (None, Cause.LIMIT) else ""
        color = "red" if why else "green"
        width = len(str(self._total))
        self._console.print(
            f"[dim]{self._ended:{width}}/{self._total}[/dim]  {escape(f'{record.scenario}/{record.number}')}"
            f"  [{color}]{record.outcome.value}[/{color}]  {', '.join(facts)}{escape(why)}"
        )

    def _redraw(self) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._ended, description=f"{self._running} running")


@contextmanager
def open_progress(*, is_resumed: bool) -> Iterator[RunProgress]:
    """Progress of a run, for the time of the block."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        yield RunProgress(console, None, is_resumed=is_resumed)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        yield RunProgress(console, bar, is_resumed=is_resumed)

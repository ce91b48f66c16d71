"""A run in the foreground: progress on standard error, Ctrl+C, and how to resume it if it stops early.

There is a line per rollout. A terminal also shows a row for each session that fits. Elsewhere a status line comes after
a moment of silence, so there is output every two seconds. A separate thread writes it, even while the event loop is
busy.
"""

import shlex
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from harness.cli import output
from harness.errors import Cause, HarnessError
from harness.rollouts.client.session_server import SessionSummary
from harness.server.telemetry.printable import printable
from harness.suite.exits import ExitCode, exit_code_of
from harness.suite.record.rollout_table import RolloutRecord
from harness.suite.run.interrupts import Interrupts
from harness.suite.scenarios.plan import PlannedRollout
from harness.viewer.live.live_reading import LiveSessions
from harness.viewer.terminal import live_table

if TYPE_CHECKING:
    from harness.suite.run.report import RunReport
    from harness.suite.training.report import TrainReport

_Report = TypeVar("_Report", "RunReport", "TrainReport")


def describe_seconds(seconds: float) -> str:
    """Format `75` as `1:15`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


SILENCE_S = 1.5
"""Silence after which a pipe gets a status line."""

_LOOK_S = 0.25
_MOST_ROWS = 40
_OTHER_LINES = 4  # of the terminal: the bar, the head of the table, what does not fit, and the cursor


class RunProgress:
    """Implementation of `harness.suite.run.batch.Progress`."""

    def __init__(
        self,
        console: Console,
        *,
        is_resumed: bool,
        silence_s: float = SILENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._silence_s = silence_s
        self._clock = clock
        self._is_resumed = is_resumed
        self._doing, self._total, self._ended, self._running = "starting", 0, 0, 0
        self._began_at = self._said_at = self._doing_since = clock()
        self._first_at: float | None = None
        """Time when the first rollout of this process began."""
        self._ended_before = self._tokens_of_ended = 0
        self.live = LiveSessions()
        """Sessions seen last; its tokens include ended rollouts'."""

    def say(self, text: str) -> None:
        self._doing, self._doing_since = text, self._clock()
        self._print(f"[dim]{escape(text)}[/]")

    def begin(self, total: int, done: int) -> None:
        """Set the totals; a resumed run reports where it stopped."""
        self._total, self._ended, self._ended_before = total, done, done
        if self._is_resumed:
            self.say(f"run was interrupted: {done} of {total} rollouts finished, {total - done} to run")

    def begin_rollout(self, rollout: PlannedRollout) -> None:
        self._running += 1
        if self._first_at is None:
            self._first_at = self._clock()

    def look(self, sessions: Mapping[str, SessionSummary]) -> None:
        tokens = self._tokens_of_ended + sum(each.tokens for each in sessions.values())
        self.live.look(sessions, tokens, self._clock())

    def end_rollout(self, record: RolloutRecord) -> None:
        """Print a line for the rollout, with its full error."""
        self._running -= 1
        self._ended += 1
        self._tokens_of_ended += record.session.ledger.generated
        if not self._running:
            self._doing, self._doing_since = "collecting results", self._clock()
        turns = record.session.turns
        facts = [f"{turns} turn{'s' * (turns != 1)}", f"{record.session.ledger.generated} tokens"]
        if record.reward is not None:
            facts.append(f"reward {record.reward:.2f}")
        facts.append(f"{record.seconds:.1f} s")
        why = f" ({record.cause.value}: {printable(record.detail)})" if record.cause not in (None, Cause.LIMIT) else ""
        color = "red" if why else "green"
        self._print(
            f"[dim]{self._ended:{len(str(self._total))}}/{self._total}[/dim]"
            f"  {escape(f'{record.scenario}/{record.number}')}"
            f"  [{color}]{record.outcome.value}[/{color}]  {', '.join(facts)}{escape(why)}"
        )

    def words(self, now: float) -> str:
        if not self._running:
            return f"{printable(self._doing)}: {now - self._doing_since:.0f} s"
        states = Counter(printable(each.state) for each in self.live.sessions.values())
        by_state = f" ({', '.join(f'{count} {state}' for state, count in states.most_common())})" if states else ""
        eta, here, left = "", self._ended - self._ended_before, self._total - self._ended
        if self._first_at is not None and here and left:  # at the pace so far
            eta = f", about {describe_seconds((now - self._first_at) / here * left)} left"
        speed = f"{self.live.tokens_per_s:.0f} tokens/s"
        return f"{self._ended} of {self._total} ended, {self._running} running{by_state}, {speed}{eta}"

    def break_silence(self) -> None:
        """Print the status unless something was printed a moment ago."""
        if self._clock() - self._said_at >= self._silence_s:
            self._print(f"[dim]{escape(self.words(self._clock()))}[/]")

    def draw(self) -> RenderableType:
        """Render the live view: overall progress, and a row for each session that fits."""
        now, sessions = self._clock(), len(self.live.sessions)
        head = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=max(1, self._total), completed=self._ended, width=20)
        head.add_row(bar, Text(f"{describe_seconds(now - self._began_at)}  {self.words(now)}"))
        if not self._running or not sessions:
            return head
        fitting = max(0, min(_MOST_ROWS, self._console.height - _OTHER_LINES))
        left = self._running - min(fitting, sessions)
        more = [Text(f"and {left} more", style="dim")] if left > 0 else []
        return Group(head, live_table(self.live, most=fitting), *more)

    def _print(self, markup: str) -> None:
        self._said_at = self._clock()
        self._console.print(markup)


@contextmanager
def open_progress(*, is_resumed: bool, silence_s: float = SILENCE_S) -> Iterator[RunProgress]:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    progress = RunProgress(console, is_resumed=is_resumed, silence_s=silence_s)
    if console.is_terminal:
        with Live(get_renderable=progress.draw, console=console, transient=True, refresh_per_second=2):
            yield progress
        return
    over = threading.Event()

    def keep_talking() -> None:
        while not over.wait(_LOOK_S):
            progress.break_silence()

    talking = threading.Thread(target=keep_talking, name="progress", daemon=True)
    talking.start()
    try:
        yield progress
    finally:
        over.set()
        talking.join()


def run_resumably(
    work: Callable[[RunProgress, Interrupts], Coroutine[Any, Any, _Report]],
    command: Sequence[str],
    *,
    is_resumed: bool = False,
    silence_s: float = SILENCE_S,
) -> _Report:
    """Run to the report. If it stops early, print the `harness` command that resumes it."""
    import uvloop

    async def run() -> _Report:
        interrupts = Interrupts()
        with open_progress(is_resumed=is_resumed, silence_s=silence_s) as progress, interrupts.from_signals():
            return await work(progress, interrupts)

    resume = f"resume with: harness {shlex.join(command)} --resume"
    try:
        report = uvloop.run(run())
    except HarnessError as error:
        if exit_code_of(error) is not ExitCode.USAGE:  # the same command would fail in the same way
            output.say(resume)
        raise
    if not report.is_complete:
        output.say(resume)
    return report

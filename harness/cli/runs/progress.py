"""Progress of a run on standard error: a line per rollout, and a live view on a terminal.

A terminal shows a row for each session that fits. Elsewhere a status line comes after a moment of silence, so there is
output every two seconds. A separate thread writes it, even while the event loop is busy.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from harness.cli.live_table import live_table
from harness.errors import Cause
from harness.rollouts.client.session_server import SessionSummary
from harness.server.telemetry.printable import printable
from harness.suite.record.rollout_table import RolloutRecord
from harness.suite.scenarios.plan import PlannedRollout
from harness.viewer.live.live_reading import LiveSessions


@dataclass(slots=True)
class RunStatus:
    """Status of a run; times are seconds of one clock."""

    doing: str = "starting"
    since: float = 0.0
    total: int = 0
    ended: int = 0
    running: int = 0
    live: LiveSessions = field(default_factory=LiveSessions)
    """Sessions seen last; its tokens are those of ended rollouts, too."""
    _began_at: float | None = None
    _ended_before: int = 0
    _tokens_of_ended: int = 0

    def begin(self, total: int, done: int) -> None:
        """Set the number of rollouts, and of those already done."""
        self.total, self.ended, self._ended_before = total, done, done

    def begin_rollout(self, now: float) -> None:
        self.running += 1
        if self._began_at is None:
            self._began_at = now

    def end_rollout(self, record: RolloutRecord) -> None:
        self.running -= 1
        self.ended += 1
        self._tokens_of_ended += record.session.ledger.generated

    def look(self, sessions: Mapping[str, SessionSummary], now: float) -> None:
        self.live.look(sessions, self._tokens_of_ended + sum(each.tokens for each in sessions.values()), now)

    def seconds_left(self, now: float) -> float | None:
        """Estimate the time left at the pace so far, or None."""
        here = self.ended - self._ended_before
        if self._began_at is None or not here or self.ended == self.total:
            return None
        return (now - self._began_at) / here * (self.total - self.ended)

    def words(self, now: float) -> str:
        """Return the status as one line."""
        if not self.running:
            return f"{printable(self.doing)}: {now - self.since:.0f} s"
        states = Counter(printable(each.state) for each in self.live.sessions.values())
        by_state = f" ({', '.join(f'{count} {state}' for state, count in states.most_common())})" if states else ""
        left = self.seconds_left(now)
        eta = "" if left is None else f", about {describe_seconds(left)} left"
        speed = f"{self.live.tokens_per_s:.0f} tokens/s"
        return f"{self.ended} of {self.total} ended, {self.running} running{by_state}, {speed}{eta}"


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
        self._began_at = self._said_at = clock()
        self.standing = RunStatus(since=self._began_at)

    def say(self, text: str) -> None:
        self.standing.doing, self.standing.since = text, self._clock()
        self._print(f"[dim]{escape(text)}[/]")

    def begin(self, total: int, done: int) -> None:
        """Set the totals; a resumed run reports where it stopped."""
        self.standing.begin(total, done)
        if self._is_resumed:
            self.say(f"run was interrupted: {done} of {total} rollouts finished, {total - done} to run")

    def begin_rollout(self, rollout: PlannedRollout) -> None:
        self.standing.begin_rollout(self._clock())

    def look(self, sessions: Mapping[str, SessionSummary]) -> None:
        self.standing.look(sessions, self._clock())

    def end_rollout(self, record: RolloutRecord) -> None:
        """Print a line for the rollout, with its full error."""
        self.standing.end_rollout(record)
        if not self.standing.running:
            self.standing.doing, self.standing.since = "putting the results together", self._clock()
        turns = record.session.turns
        facts = [f"{turns} turn{'s' * (turns != 1)}", f"{record.session.ledger.generated} tokens"]
        if record.reward is not None:
            facts.append(f"reward {record.reward:.2f}")
        facts.append(f"{record.seconds:.1f} s")
        why = f" ({record.cause.value}: {printable(record.detail)})" if record.cause not in (None, Cause.LIMIT) else ""
        color = "red" if why else "green"
        width = len(str(self.standing.total))
        self._print(
            f"[dim]{self.standing.ended:{width}}/{self.standing.total}[/dim]"
            f"  {escape(f'{record.scenario}/{record.number}')}"
            f"  [{color}]{record.outcome.value}[/{color}]  {', '.join(facts)}{escape(why)}"
        )

    def break_silence(self) -> None:
        """Print the status unless something was printed a moment ago."""
        if self._clock() - self._said_at >= self._silence_s:
            self._print(f"[dim]{escape(self.standing.words(self._clock()))}[/]")

    def draw(self) -> RenderableType:
        """Render the live view: overall progress, and a row for each session that fits."""
        standing, now = self.standing, self._clock()
        head = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=max(1, standing.total), completed=standing.ended, width=20)
        head.add_row(bar, Text(f"{describe_seconds(now - self._began_at)}  {standing.words(now)}"))
        if not standing.running or not standing.live.sessions:
            return head
        fitting = max(0, min(_MOST_ROWS, self._console.height - _OTHER_LINES))
        left = standing.running - min(fitting, len(standing.live.sessions))
        more = [Text(f"and {left} more", style="dim")] if left > 0 else []
        return Group(head, live_table(standing.live, most=fitting), *more)

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

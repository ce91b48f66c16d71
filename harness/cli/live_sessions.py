"""Sessions of a running server as last seen, with their speed, for `harness run` and `harness ctl top`."""

from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING

from harness.server.telemetry.printable import printable

if TYPE_CHECKING:
    from rich.table import Table

    from harness.rollouts.client.session_server import SessionSummary

_WINDOW_S = 10.0
"""Time that the speed of all sessions covers."""
_COLORS = {"engine": "green", "held": "yellow", "queued": "yellow", "tool": "cyan"}


class LiveSessions:
    """Sessions by name; times are seconds of one clock."""

    def __init__(self) -> None:
        self.sessions: Mapping[str, SessionSummary] = {}
        self._rates: Mapping[str, float] = {}
        self._seen: deque[tuple[float, int]] = deque()

    def look(self, sessions: "Mapping[str, SessionSummary]", tokens: int, now: float) -> None:
        """Record the sessions, and the tokens of these and all others so far."""
        seconds = now - self._seen[-1][0] if self._seen else 0.0
        before = self.sessions if seconds > 0 else {}
        self._rates = {
            name: max(0.0, (each.tokens - before[name].tokens) / seconds)
            for name, each in sessions.items()
            if name in before
        }
        self.sessions = sessions
        self._seen.append((now, tokens))
        while len(self._seen) > 2 and now - self._seen[0][0] > _WINDOW_S:
            self._seen.popleft()

    def rate_of(self, name: str) -> float | None:
        """Return a session's tokens per second between the last two looks, or None if the last one was its first."""
        return self._rates.get(name)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second lately; 0 before the second look, and after a restart of the server."""
        if not self._seen:
            return 0.0
        (first, before), (last, tokens) = self._seen[0], self._seen[-1]
        return max(0.0, (tokens - before) / (last - first)) if last > first else 0.0

    def table(self, *, most: int | None = None, name_width: int | None = None) -> "Table":
        """Render a row for each of the first `most` sessions, with the server's words made printable."""
        from rich.table import Table
        from rich.text import Text

        rows = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
        rows.add_column("session", no_wrap=True)
        rows.add_column("state", no_wrap=True)
        for title in ("turns", "in flight", "tokens", "tokens/s"):
            rows.add_column(title, justify="right", no_wrap=True)
        # A terminal is drawn by another thread than the one that looks.
        for name, each in islice(self.sessions.items(), most):
            rate = self.rate_of(name)
            state = Text(printable(each.state), style=_COLORS.get(each.state, ""))
            numbers = (f"{each.turns:,}", f"{each.turns_in_flight}", f"{each.tokens:,}")
            rows.add_row(Text(printable(name)[:name_width]), state, *numbers, "-" if rate is None else f"{rate:.0f}")
        return rows

"""Live sessions as a table, for `harness run` and `harness ctl top`."""

from itertools import islice

from rich.table import Table
from rich.text import Text

from harness.server.telemetry.printable import printable
from harness.viewer.live.live_reading import LiveSessions
from harness.viewer.terminal import empty_table

_COLORS = {"engine": "green", "held": "yellow", "queued": "yellow", "tool": "cyan"}


def live_table(live: LiveSessions, *, most: int | None = None, name_width: int | None = None) -> Table:
    """Render a row for each of the first `most` sessions, with the server's words made printable."""
    rows = empty_table("session", "state", numbers=("turns", "in flight", "tokens", "tokens/s"))
    # A terminal is drawn by another thread than the one that looks.
    for name, each in islice(live.sessions.items(), most):
        rate = live.rates.get(name)
        state = Text(printable(each.state), style=_COLORS.get(each.state, ""))
        numbers = (f"{each.turns:,}", f"{each.turns_in_flight}", f"{each.tokens:,}")
        rows.add_row(Text(printable(name)[:name_width]), state, *numbers, "-" if rate is None else f"{rate:.0f}")
    return rows

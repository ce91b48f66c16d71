"""`harness ctl top`: a server's busiest sessions, gate holds and workers, every second.

It sends two requests a second; the server picks the sessions. Rates need two readings, so even one takes a second.
"""

import asyncio
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli import options, output
from harness.cli.operate.server_option import AdminToken, Server, ask_server
from harness.server.telemetry.printable import printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from harness.rollouts.client.session_server import SampledBy, SessionList, SessionServerClient
    from harness.sessions.gate import GateReport, HoldReport
    from harness.types import Json

_EVERY_S = 1.0
_DEADLINE_S = 30.0
_ID_SHOWN = 12  # as much as `sessions show` and `sessions delete` take for an id
_PLAIN_WIDTH = 120

_Limit = Annotated[int, typer.Option("--limit", min=1, max=1_000, help="Sessions to show, the busiest first.")]
_Once = Annotated[bool, typer.Option("--once", help="Print one reading, as where standard output is no terminal.")]


@dataclass(frozen=True, slots=True)
class Reading:
    """A server now and a second ago."""

    gate: "GateReport"
    now: "SessionList"
    before: "SessionList"
    seconds: float
    """Between the two."""

    def rate_of(self, session_id: str) -> float | None:
        """Return the tokens per second of a listed session, or None if it is new in the list."""
        tokens = {each.session_id: each.tokens for each in self.before.sessions}.get(session_id)
        now = next(each.tokens for each in self.now.sessions if each.session_id == session_id)
        return None if tokens is None else max(0.0, (now - tokens) / self.seconds)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all sessions; 0 if the server has restarted."""
        return max(0.0, (self.now.totals.tokens - self.before.totals.tokens) / self.seconds)

    def to_json(self) -> "Json":
        """Return the document of `--json`."""
        from msgspec import to_builtins

        sessions = [{**to_builtins(each), "tokens_per_s": self.rate_of(each.session_id)} for each in self.now.sessions]
        return {
            "sessions": sessions,
            "totals": {**to_builtins(self.now.totals), "tokens_per_s": self.tokens_per_s},
            "gate": to_builtins(self.gate),
            "workers": to_builtins(self.now.workers),
            "problems": self.now.problems,
        }


def top(
    *,
    server: Server,
    admin_token: AdminToken = None,
    limit: _Limit = 20,
    once: _Once = False,
    as_json: options.Json = False,
) -> None:
    """Watch the busiest sessions, the holds on the gate and the workers; Ctrl+C ends it.

    Examples: `harness ctl top --server URL`, `harness ctl top --once --limit 5`
    """
    from harness.viewer.terminal import show

    if not as_json and not once and sys.stdout.isatty():
        with suppress(KeyboardInterrupt):  # the way to leave
            ask_server(server, admin_token, lambda client: _watch(client, limit))
        return

    async def read(client: "SessionServerClient") -> Reading:
        return await _read_again(client, limit, await client.busiest(limit, deadline_s=_DEADLINE_S))

    reading = ask_server(server, admin_token, read)
    if as_json:
        output.print_json(reading.to_json())
    else:
        show(draw(reading), plain_width=_PLAIN_WIDTH)


async def _watch(client: "SessionServerClient", limit: int) -> None:
    from rich.console import Console
    from rich.live import Live

    reading = await _read_again(client, limit, await client.busiest(limit, deadline_s=_DEADLINE_S))
    with Live(draw(reading), console=Console(highlight=False), screen=True, auto_refresh=False) as live:
        while True:
            live.update(draw(reading), refresh=True)
            reading = await _read_again(client, limit, reading.now)


async def _read_again(client: "SessionServerClient", limit: int, before: "SessionList") -> Reading:
    """Return the reading a second from now."""
    loop = asyncio.get_running_loop()
    began_at = loop.time()
    await asyncio.sleep(_EVERY_S)
    now = await client.busiest(limit, deadline_s=_DEADLINE_S)
    seconds = loop.time() - began_at
    return Reading(await client.gate().report(deadline_s=_DEADLINE_S), now, before, seconds)


def draw(reading: Reading) -> "RenderableType":
    """Render the reading, with the server's words made printable."""
    from rich.console import Group
    from rich.text import Text

    totals, gate = reading.now.totals, reading.gate
    states = ", ".join(f"{count} {printable(state)}" for state, count in sorted(totals.states.items())) or "none"
    since_start = f"{totals.turns:,} turns, {totals.tokens:,} tokens since the start"
    lines = [
        f"sessions  {states}; {since_start}, {reading.tokens_per_s:.0f} tokens/s",
        f"gate      {gate.state}, {gate.held} requests wait",
        *(f"hold      {describe_hold(each)}" for each in gate.holds),
        *(f"worker    {_describe_worker(each)}" for each in reading.now.workers),
        *(f"problem   {printable(each)}" for each in reading.now.problems),
    ]
    return Group(*map(Text, lines), Text(""), _rows(reading))


def describe_hold(hold: "HoldReport") -> str:
    """Describe holder, kind and remaining time."""
    engines = ", and the engines" if hold.engines else ""
    return f"{printable(hold.holder)}  {hold.kind}{engines}, ends in {hold.ends_in_s:.0f} s"


def _describe_worker(worker: "SampledBy") -> str:
    name, version = printable(worker.name) or "the engine", printable(worker.weight_version) or "-"
    return f"{name}  version {version}, {printable(worker.fence) or 'serves'}, {worker.in_flight} in flight"


def _rows(reading: Reading) -> "Table":
    from rich.table import Table
    from rich.text import Text

    rows = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    rows.add_column("session", no_wrap=True)
    rows.add_column("state", no_wrap=True)
    for name in ("turns", "in flight", "tokens", "tokens/s"):
        rows.add_column(name, justify="right", no_wrap=True)
    for each in reading.now.sessions:
        rate = reading.rate_of(each.session_id)
        numbers = (
            f"{each.turns:,}",
            f"{each.turns_in_flight}",
            f"{each.tokens:,}",
            "-" if rate is None else f"{rate:.0f}",
        )
        rows.add_row(Text(printable(each.session_id)[:_ID_SHOWN]), Text(printable(each.state)), *numbers)
    return rows

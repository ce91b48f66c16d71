"""`harness ctl top`: a server's busiest sessions, gate holds and workers, every second.

It sends two requests a second; the server picks the sessions. Rates need two readings, so even one takes a second.
"""

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli import options, output
from harness.cli.live_sessions import LiveSessions
from harness.cli.operate.server_option import ask_named
from harness.server.telemetry.printable import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from harness.rollouts.client.session_server import SampledBy, SessionList, SessionServerClient
    from harness.sessions.gate import GateReport
    from harness.types import Json

_EVERY_S = 1.0
_DEADLINE_S = 30.0
_ID_SHOWN = 12  # as much as `sessions show` and `sessions delete` take for an id
_PLAIN_WIDTH = 120

_Limit = Annotated[int, typer.Option("--limit", min=1, max=1_000, help="Sessions to show, the busiest first.")]
_Once = Annotated[bool, typer.Option("--once", help="Print one reading, as where standard output is no terminal.")]


@dataclass(frozen=True, slots=True)
class Reading:
    """A server as last seen."""

    gate: "GateReport"
    listed: "SessionList"
    live: LiveSessions
    """The listed sessions."""

    def to_json(self) -> "Json":
        from msgspec import to_builtins

        sessions = [
            {**to_builtins(each), "tokens_per_s": self.live.rate_of(name)} for name, each in self.live.sessions.items()
        ]
        return {
            "sessions": sessions,
            "totals": {**to_builtins(self.listed.totals), "tokens_per_s": self.live.tokens_per_s},
            "gate": to_builtins(self.gate),
            "workers": to_builtins(self.listed.workers),
            "problems": self.listed.problems,
        }


def top(
    *,
    server: options.Server,
    admin_token: options.AdminToken = None,
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
            ask_named(server, admin_token, lambda client: _watch(client, limit))
        return

    async def read(client: "SessionServerClient") -> Reading:
        live = LiveSessions()
        await _look(client, limit, live)
        await asyncio.sleep(_EVERY_S)
        return await _look(client, limit, live)

    reading = ask_named(server, admin_token, read)
    if as_json:
        output.print_json(reading.to_json())
    else:
        show(draw(reading), plain_width=_PLAIN_WIDTH)


async def _watch(client: "SessionServerClient", limit: int) -> None:
    from rich.console import Console
    from rich.live import Live

    live = LiveSessions()
    first = draw(await _look(client, limit, live))
    with Live(first, console=Console(highlight=False), screen=True, auto_refresh=False) as screen:
        while True:
            await asyncio.sleep(_EVERY_S)
            screen.update(draw(await _look(client, limit, live)), refresh=True)


async def _look(client: "SessionServerClient", limit: int, live: LiveSessions) -> Reading:
    listed = await client.busiest(limit, deadline_s=_DEADLINE_S)
    live.look({each.session_id: each for each in listed.sessions}, listed.totals.tokens, time.monotonic())
    return Reading(await client.gate().report(deadline_s=_DEADLINE_S), listed, live)


def draw(reading: Reading) -> "RenderableType":
    """Render the reading, with the server's words made printable."""
    from rich.console import Group
    from rich.text import Text

    totals, gate = reading.listed.totals, reading.gate
    states = ", ".join(f"{count} {printable(state)}" for state, count in sorted(totals.states.items())) or "none"
    since_start = f"{totals.turns:,} turns, {totals.tokens:,} tokens since the start"
    lines = [
        f"sessions  {states}; {since_start}, {reading.live.tokens_per_s:.0f} tokens/s",
        *gate_lines(gate),
        *(f"worker    {_describe_worker(each)}" for each in reading.listed.workers),
        *(f"problem   {printable(each)}" for each in reading.listed.problems),
    ]
    return Group(*map(Text, lines), Text(""), reading.live.table(name_width=_ID_SHOWN))


def gate_lines(gate: "GateReport") -> Iterator[str]:
    """Yield the state of the gate, then holder, kind and remaining time of each hold."""
    yield f"gate      {gate.state}, {gate.held} requests wait"
    for hold in gate.holds:
        engines = ", and the engines" if hold.engines else ""
        yield f"hold      {printable(hold.holder)}  {hold.kind}{engines}, ends in {hold.ends_in_s:.0f} s"


def _describe_worker(worker: "SampledBy") -> str:
    name, version = printable(worker.name) or "the engine", printable(worker.weight_version) or "-"
    return f"{name}  version {version}, {printable(worker.fence) or 'serves'}, {worker.in_flight} in flight"

"""`harness ctl top`: a server's busiest sessions, gate holds and workers, every second.

It sends two requests a second; the server picks the sessions. Rates need two readings, so even one takes a second.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli import options, output
from harness.server.telemetry.printable import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from harness.rollouts.client.session_server import SessionServerClient
    from harness.types import Json
    from harness.viewer.live.live_reading import Reading

_EVERY_S = 1.0
_DEADLINE_S = 30.0
_ID_SHOWN = 12  # as much as `sessions show` and `sessions delete` take for an id
_PLAIN_WIDTH = 120

_Limit = Annotated[int, typer.Option(min=1, max=1_000, help="Sessions to show, the busiest first.")]
_Once = Annotated[
    bool, typer.Option("--once", help="Print one reading and exit, as where standard output is not a terminal.")
]


def top(
    *,
    server: options.Server,
    admin_token: options.AdminToken = None,
    limit: _Limit = 20,
    once: _Once = False,
    as_json: options.Json = False,
) -> None:
    """Watch the busiest sessions, the holds on the gate and the workers; Ctrl+C stops.

    Examples: `harness ctl top --server URL`, `harness ctl top --once --limit 5`
    """
    from harness.viewer.terminal import show

    if not as_json and not once and sys.stdout.isatty():
        with suppress(KeyboardInterrupt):  # the way to leave
            options.ask_named(server, admin_token, lambda client: _watch(client, limit))
        return

    reading = options.ask_named(server, admin_token, partial(_read_twice, limit=limit))
    if as_json:
        output.print_json(_to_json(reading))
    else:
        show(draw(reading), plain_width=_PLAIN_WIDTH)


async def _read_twice(client: "SessionServerClient", limit: int) -> "Reading":
    looks = _look(client, limit)
    await anext(looks)
    return await anext(looks)


async def _watch(client: "SessionServerClient", limit: int) -> None:
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(highlight=False), screen=True, auto_refresh=False) as screen:
        async for reading in _look(client, limit):
            screen.update(draw(reading), refresh=True)


async def _look(client: "SessionServerClient", limit: int) -> "AsyncIterator[Reading]":
    from harness.viewer.live.live_reading import LiveSessions, read_server

    live = LiveSessions()
    while True:
        yield await read_server(client, live, time.monotonic(), limit=limit, deadline_s=_DEADLINE_S)
        await asyncio.sleep(_EVERY_S)


def _to_json(reading: "Reading") -> "Json":
    from msgspec import to_builtins

    live, listed = reading.live, reading.listed
    return {
        "sessions": [{**to_builtins(each), "tokens_per_s": live.rates.get(i)} for i, each in live.sessions.items()],
        "totals": {**to_builtins(listed.totals), "tokens_per_s": live.tokens_per_s},
        "gate": to_builtins(reading.gate),
        "workers": to_builtins(listed.workers),
        "problems": listed.problems,
    }


def draw(reading: "Reading") -> "RenderableType":
    """Render the reading, with the server's words made printable."""
    from rich.console import Group
    from rich.text import Text

    from harness.cli.live_table import live_table

    facts = [*reading.facts(), *(("problem", each) for each in reading.listed.problems)]
    return Group(Text("\n".join(fact_lines(facts))), Text(""), live_table(reading.live, name_width=_ID_SHOWN))


def fact_lines(facts: Iterable[tuple[str, str]]) -> Iterator[str]:
    return (f"{name:<9} {printable(words)}" for name, words in facts)

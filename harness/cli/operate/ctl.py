"""`harness ctl`: manual control of a running server, front or router.

An operator's hold has a name and an end, like a program's. Each `pause` and `drain` makes a name that begins with
account and machine, unless `--holder` gives one. `resume` releases this account's only hold. With several, or none, it
changes nothing and lists them: one controller opens another's gate only by name.

`top` sends two requests a second; the server picks the sessions. Rates need two readings, so even one takes a second.
"""

import asyncio
import getpass
import os
import re
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli import options, output
from harness.errors import RunError, SessionServerError
from harness.server.telemetry.printable import printable
from harness.suite.exits import ExitCode

if TYPE_CHECKING:
    from rich.console import RenderableType

    from harness.rollouts.client.session_server import RoutedWorker, ServerDescription, SessionServerClient
    from harness.sessions.gate import GateReport
    from harness.types import Json
    from harness.viewer.live.live_reading import Reading

_EVERY_S = 1.0
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

    from harness.viewer.terminal import live_table

    facts = [*reading.facts(), *(("problem", each) for each in reading.listed.problems)]
    return Group(Text("\n".join(fact_lines(facts))), Text(""), live_table(reading.live, name_width=_ID_SHOWN))


def fact_lines(facts: Iterable[tuple[str, str]]) -> Iterator[str]:
    return (f"{name:<9} {printable(words)}" for name, words in facts)


app = typer.Typer(no_args_is_help=True, help="Close and open a running server's gate, and show its state.")
app.command("top")(top)

_DEADLINE_S = 30.0
"""For one gate verb, retries included; a drain marks every session durably."""
_TTL_S = 600.0
"""Long enough to work with, short enough if the operator forgets it."""

_Ttl = Annotated[float, typer.Option(min=1, max=86_400, help="Seconds until the hold expires.")]
_Renewed = Annotated[str | None, typer.Option(help="Renew the hold of this name, or place a new one.")]
_Released = Annotated[str | None, typer.Option(help="Name of the hold, of any account.")]


@app.command("status")
def status(*, server: options.Server, admin_token: options.AdminToken = None, as_json: options.Json = False) -> None:
    """Show the gate with its holds and waiting requests, and the engines; for a router its workers too."""
    description, gate, workers = options.ask_named(server, admin_token, _read_status)
    listed = None if workers is None else [each._asdict() for each in workers]
    lines = [f"server    harness {description.harness}, {', '.join(description.engines) or 'no engine'}"]
    lines.append(_describe_gate(gate))
    for worker in workers or ():
        serves = "serves" if worker.is_serving else "serves no session"
        lines.append(f"worker    {worker.url}  {worker.engine or 'has never answered'}, {serves}")
    document = {"server": description, "gate": gate, "workers": listed}
    output.print_result(document, "\n".join(lines), as_json=as_json)
    _exit_by(gate)


@app.command("pause")
def pause(
    *,
    server: options.Server,
    admin_token: options.AdminToken = None,
    holder: _Renewed = None,
    ttl: _Ttl = _TTL_S,
    as_json: options.Json = False,
) -> None:
    """Hold new turns and sessions; turns in flight continue. Ends by `resume`, or after --ttl.

    Examples: `harness ctl pause --server URL --ttl 300`
    """
    _place("pause", server, admin_token, holder, ttl, as_json=as_json)


@app.command("drain")
def drain(
    *,
    server: options.Server,
    admin_token: options.AdminToken = None,
    holder: _Renewed = None,
    ttl: _Ttl = _TTL_S,
    as_json: options.Json = False,
) -> None:
    """End every open session for good, and refuse new ones until `resume`, or for --ttl.

    Turns in flight continue for the server's --drain-grace.
    """
    _place("drain", server, admin_token, holder, ttl, as_json=as_json)


@app.command("resume")
def resume(
    *,
    server: options.Server,
    admin_token: options.AdminToken = None,
    holder: _Released = None,
    as_json: options.Json = False,
) -> None:
    """Release this account's hold; the gate opens unless another hold remains.

    A hold that paused engines is released by name only, and the server then continues them: let a weight update finish
    first.
    """

    async def release(client: "SessionServerClient") -> "tuple[str | None, GateReport]":
        before = await client.gate().report(deadline_s=_DEADLINE_S)
        name = _find_hold(before, holder)
        if name is None:
            return None, before
        return name, await client.gate(name).resume(deadline_s=_DEADLINE_S)

    released, gate = options.ask_named(server, admin_token, release)
    said = f"released  {printable(released) if released else 'nothing: the gate had no hold'}\n{_describe_gate(gate)}"
    output.print_result({"holder": released, "gate": gate}, said, as_json=as_json)
    _exit_by(gate)


def _place(verb: str, server: str, admin_token: str | None, holder: str | None, ttl_s: float, *, as_json: bool) -> None:
    from harness.rollouts.client.gate import new_holder

    name = holder or new_holder(_account())

    async def place(client: "SessionServerClient") -> "GateReport":
        gate = client.gate(name, ttl_s)
        return await (gate.pause if verb == "pause" else gate.drain)(deadline_s=_DEADLINE_S)

    try:
        gate = options.ask_named(server, admin_token, place)
    except (SessionServerError, KeyboardInterrupt) as error:
        if not isinstance(error, SessionServerError) or not 400 <= error.status < 500:
            output.say(f"harness: the hold {printable(name)} may still be in place, for up to {ttl_s:.0f} s")
        raise
    drained = f"drained   sessions ended for good: {gate.sessions_closed}\n" if verb == "drain" else ""
    said = f"holder    {printable(name)}\n{drained}{_describe_gate(gate)}"
    output.print_result({"holder": name, "gate": gate}, said, as_json=as_json)
    _exit_by(gate)


def _find_hold(gate: "GateReport", holder: str | None) -> str | None:
    """Return the hold to release: the named one, else this account's only one, or None if there is none."""
    names = [each.holder for each in gate.holds]
    listed = ", ".join(printable(name) for name in names) or "none"
    if holder is not None:
        if holder not in names:
            raise RunError(f"no hold {printable(holder)}: released or expired; current holds: {listed}")
        return holder
    # Match the whole name: one machine's name may begin with another's.
    mine = [name for name in names if re.fullmatch(re.escape(_account()) + "-[0-9a-f]{16}", name)]
    if len(mine) > 1 or (names and not mine):
        raise RunError(
            f"expected one hold of {_account()}, got {len(mine)}, and released none: --holder NAME releases"
            f" any of them: {listed}"
        )
    return mine[0] if mine else None


def _account() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user id without a name
        user = str(os.getuid())
    return f"ctl-{user}@{socket.gethostname()}"[:150]  # a holder's name has at most 200 characters


def _describe_gate(gate: "GateReport") -> str:
    from harness.viewer.live.live_reading import gate_facts

    turns = f"{gate.turns_in_flight} turns in flight, {gate.turns_held} wait at the gate"
    sessions = f"{gate.sessions}, {gate.sessions_open} accept turns; {turns}"
    return "\n".join(fact_lines([*gate_facts(gate), ("sessions", sessions)]))


def _exit_by(gate: "GateReport") -> None:
    # A shard did not get the command; running it again may work.
    for problem in gate.problems:
        output.say(f"harness: {printable(problem)}")
    if gate.problems:
        raise typer.Exit(ExitCode.INFRASTRUCTURE)


async def _read_status(
    client: "SessionServerClient",
) -> "tuple[ServerDescription, GateReport, list[RoutedWorker] | None]":
    description = await client.describe(deadline_s=_DEADLINE_S)
    gate = await client.gate().report(deadline_s=_DEADLINE_S)
    try:
        return description, gate, await client.list_routed_workers(deadline_s=_DEADLINE_S)
    except SessionServerError as error:
        if error.status != 404:
            raise
        return description, gate, None

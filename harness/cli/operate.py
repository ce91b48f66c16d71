"""`harness ctl` and `harness sessions`: a server that runs, a front of shards or a router, turned by hand.

A person shuts the gate as programs do: with a hold that has a name and an end. Each `pause` and `drain` makes a name of
its own, which begins with the account and the machine, unless it renews one by `--holder`. `resume` releases the only
hold of this account; where there are several, or none, it changes nothing and lists them: no controller opens the gate
under another one unless it names its hold.
"""

import asyncio
import getpass
import os
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from harness.cli import options, output
from harness.errors import RunError, SessionDamaged, SessionServerError
from harness.suite.exits import ExitCode
from harness.telemetry.printable import printable

if TYPE_CHECKING:
    from harness.client.session_server import RoutedWorker, ServerDescription, SessionServerClient, SessionSummary
    from harness.sessions.gate import GateReport

ctl = typer.Typer(no_args_is_help=True, help="Shut and open the gate of a server that runs, and see how it stands.")
sessions = typer.Typer(no_args_is_help=True, help="The sessions of a server that runs.")

_DEADLINE_S = 30.0
"""For one verb of the gate, repetitions included; a drain marks every session durably."""
_REACH_S = 5.0
"""For a server to answer at all: somebody waits who may have mistyped its address."""
_TTL_S = 600.0
"""Long enough for a person, and short enough for everybody else when he has forgotten it."""

_Server = Annotated[
    str,
    typer.Option(
        "--server",
        envvar="HARNESS_SERVER",
        metavar="URL",
        help="A session server, a front or a router.",
        show_default=False,
    ),
]
_AdminToken = Annotated[
    str | None, typer.Option(envvar="HARNESS_ADMIN_TOKEN", help="That of --server.", show_default=False)
]
_Ttl = Annotated[float, typer.Option("--ttl", min=1, max=86_400, help="Seconds after which the hold ends by itself.")]
_Renewed = Annotated[
    str | None, typer.Option("--holder", help="Renew the hold of that name, or place it.", show_default=False)
]
_Released = Annotated[
    str | None, typer.Option("--holder", help="The hold of that name, whoever placed it.", show_default=False)
]

_T = TypeVar("_T")


@ctl.command("status")
def status(*, server: _Server, admin_token: _AdminToken = None, as_json: options.Json = False) -> None:
    """Show the gate with its holds, what waits there, and the engines; of a router its workers too."""
    from msgspec import to_builtins

    description, gate, workers = _ask(server, admin_token, _read_status)
    if as_json:
        listed = None if workers is None else [each._asdict() for each in workers]
        output.print_json({"server": to_builtins(description), "gate": to_builtins(gate), "workers": listed})
    else:
        output.print_text(f"server    harness {description.harness}, {', '.join(description.engines) or 'no engine'}")
        _print_gate(gate)
        for worker in workers or ():
            serves = "serves" if worker.is_serving else "serves no session"
            output.print_text(f"worker    {worker.url}  {worker.engine or 'has never answered'}, {serves}")
    _exit_by(gate)


@ctl.command("pause")
def pause(
    *,
    server: _Server,
    admin_token: _AdminToken = None,
    holder: _Renewed = None,
    ttl: _Ttl = _TTL_S,
    as_json: options.Json = False,
) -> None:
    """Have new turns and sessions wait; turns in flight go on. Ends by `resume`, or after --ttl.

    Examples: `harness ctl pause --server URL --ttl 300`
    """
    _place("pause", server, admin_token, holder, ttl, as_json=as_json)


@ctl.command("drain")
def drain(
    *,
    server: _Server,
    admin_token: _AdminToken = None,
    holder: _Renewed = None,
    ttl: _Ttl = _TTL_S,
    as_json: options.Json = False,
) -> None:
    """End every open session for good, and refuse new ones until `resume`, or for --ttl.

    Turns in flight go on for the server's --drain-grace.
    """
    _place("drain", server, admin_token, holder, ttl, as_json=as_json)


@ctl.command("resume")
def resume(
    *, server: _Server, admin_token: _AdminToken = None, holder: _Released = None, as_json: options.Json = False
) -> None:
    """Release the hold of this account; the gate opens unless somebody else holds it.

    A hold that paused engines is released by name only, and the server then continues them: wait for a weight update.
    """
    from msgspec import to_builtins

    async def release(client: "SessionServerClient") -> "tuple[str | None, GateReport]":
        before = await client.gate().report(deadline_s=_DEADLINE_S)
        name = _find_hold(before, holder)
        if name is None:
            return None, before
        return name, await client.gate(name).resume(deadline_s=_DEADLINE_S)

    released, gate = _ask(server, admin_token, release)
    if as_json:
        output.print_json({"holder": released, "gate": to_builtins(gate)})
    else:
        output.print_text(f"released  {printable(released)}" if released else "released  nothing: nobody held the gate")
        _print_gate(gate)
    _exit_by(gate)


@sessions.command("list")
def list_(*, server: _Server, admin_token: _AdminToken = None, as_json: options.Json = False) -> None:
    """List the sessions that the server holds."""
    from msgspec import to_builtins

    async def read(client: "SessionServerClient") -> "list[SessionSummary]":
        return await client.sessions()

    found = _ask(server, admin_token, read)
    if as_json:
        output.print_json({"sessions": to_builtins(found)})
        return
    lines = [f"{'session':32}  {'phase':8}  turns  in flight"]
    lines += [f"{each.session_id}  {each.phase:8}  {each.turns:5}  {each.turns_in_flight:9}" for each in found]
    output.print_text("\n".join(lines))


@sessions.command("show")
def show(
    session: Annotated[str, typer.Argument(metavar="SESSION", help="Its id, or the beginning of it.")],
    *,
    server: _Server,
    admin_token: _AdminToken = None,
    as_json: options.Json = False,
) -> None:
    """Show one session: branches, dialogue, ledger. The same as `harness show --server URL SESSION`."""
    from pathlib import Path

    from harness.cli.show import show as show_session

    show_session(Path(session), server=server, admin_token=admin_token, as_json=as_json)


@sessions.command("delete")
def delete(
    session: Annotated[
        list[str], typer.Argument(metavar="SESSION...", help="Ids, or the beginnings of ids, at least 8 characters.")
    ],
    *,
    server: _Server,
    admin_token: _AdminToken = None,
    as_json: options.Json = False,
) -> None:
    """Take sessions off the server; their turns in flight end, and a store in a file keeps what they were.

    Nothing is deleted when one of the names fits no session or several. Each session is told of: deleted, unknown (a
    whole id that the server does not have) or refused; unless all are deleted the exit code is 4, or 6 for a refusal.
    """

    async def delete_all(client: "SessionServerClient") -> list[tuple[str, str, str | None]]:
        known = [each.session_id for each in await client.sessions()]
        found = dict.fromkeys(_find_session(name, known) for name in session)
        return await asyncio.gather(*(_delete(client, each) for each in found))

    ended = _ask(server, admin_token, delete_all)
    if as_json:
        output.print_json(
            {
                "deleted": [each for each, end, _ in ended if end == "deleted"],
                "unknown": [each for each, end, _ in ended if end == "unknown"],
                "refused": {each: reason for each, end, reason in ended if end == "refused"},
            }
        )
    else:
        for each, end, reason in ended:
            output.print_text(f"{end:8}  {each}" + (f"  {printable(reason)}" if reason else ""))
    ends = {end for _, end, _ in ended}
    if "refused" in ends:
        raise typer.Exit(ExitCode.INFRASTRUCTURE)
    if "unknown" in ends:
        raise typer.Exit(ExitCode.USAGE)


async def _delete(client: "SessionServerClient", session_id: str) -> tuple[str, str, str | None]:
    """The id, `deleted`, `unknown` or `refused`, and the reason of a refusal."""
    try:
        try:
            is_known = (await client.facts(session_id)).phase != "unknown"
        except SessionServerError as error:
            if error.code != SessionDamaged.code:
                raise
            is_known = True  # kept aside, and given up by the deletion
        await client.delete(session_id)
    except SessionServerError as error:
        return session_id, "refused", error.message
    return session_id, "deleted" if is_known else "unknown", None


def _find_session(name: str, known: Sequence[str]) -> str:
    from harness.viewer.run_view import SHORT_ID

    if len(name) == 32 and all(character in "0123456789abcdef" for character in name):
        return name
    fit = [each for each in known if each.startswith(name)]
    if len(name) < SHORT_ID or len(fit) != 1:
        raise RunError(
            f"expected an id, or at least {SHORT_ID} characters that one id begins with, got {name!r}, which"
            f" {len(fit)} sessions begin with; nothing is deleted, and `harness sessions list` has the ids"
        )
    return fit[0]


def _place(verb: str, server: str, admin_token: str | None, holder: str | None, ttl_s: float, *, as_json: bool) -> None:
    """Pause or drain under a hold, and say whose it is."""
    from msgspec import to_builtins

    from harness.client.gate import new_holder

    name = holder or new_holder(_account())

    async def place(client: "SessionServerClient") -> "GateReport":
        gate = client.gate(name, ttl_s)
        return await (gate.pause if verb == "pause" else gate.drain)(deadline_s=_DEADLINE_S)

    try:
        gate = _ask(server, admin_token, place)
    except (SessionServerError, KeyboardInterrupt) as error:
        if not isinstance(error, SessionServerError) or not 400 <= error.status < 500:
            output.say(f"harness: the hold {printable(name)} may stand all the same, for up to {ttl_s:.0f} s")
        raise
    if as_json:
        output.print_json({"holder": name, "gate": to_builtins(gate)})
    else:
        output.print_text(f"holder    {printable(name)}")
        if verb == "drain":
            output.print_text(f"drained   sessions ended for good: {gate.sessions_closed}")
        _print_gate(gate)
    _exit_by(gate)


def _find_hold(gate: "GateReport", holder: str | None) -> str | None:
    """The hold to release: the named one, else the only one of this account; None where nobody holds the gate."""
    names = [each.holder for each in gate.holds]
    listed = ", ".join(printable(name) for name in names) or "none"
    if holder is not None:
        if holder not in names:
            raise RunError(f"no hold {printable(holder)}: released already, or its time is over; the holds: {listed}")
        return holder
    # All of the name: that of a machine may begin that of another one.
    mine = [name for name in names if re.fullmatch(re.escape(_account()) + "-[0-9a-f]{16}", name)]
    if len(mine) > 1 or (names and not mine):
        raise RunError(
            f"expected one hold of {_account()}, got {len(mine)}, and released none: --holder NAME releases one,"
            f" whoever placed it; the holds: {listed}"
        )
    return mine[0] if mine else None


def _account() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user id without a name
        user = str(os.getuid())
    return f"ctl-{user}@{socket.gethostname()}"[:150]  # a holder's name has at most 200 characters


def _print_gate(gate: "GateReport") -> None:
    output.print_text(f"gate      {gate.state}, {gate.held} requests wait")
    for each in gate.holds:
        engines = ", and the engines" if each.engines else ""
        output.print_text(f"hold      {printable(each.holder)}  {each.kind}{engines}, ends in {each.ends_in_s:.0f} s")
    output.print_text(
        f"sessions  {gate.sessions}, {gate.sessions_open} accept turns; {gate.turns_in_flight} turns in flight,"
        f" {gate.turns_held} wait at the gate"
    )


def _exit_by(gate: "GateReport") -> None:
    """A shard that has not been told is what the exit code says: the same command may pass later."""
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


def _ask(server: str, admin_token: str | None, question: "Callable[[SessionServerClient], Awaitable[_T]]") -> _T:
    """The server's answer. Raises `ScenarioError` when `server` is no address, `SessionServerError`."""
    from harness.client.connections import SessionServerAddress, server_url
    from harness.client.session_server import SessionServerClient

    address = SessionServerAddress(server_url(server), admin_token)

    async def ask() -> _T:
        async with SessionServerClient(address) as client:
            await client.describe(deadline_s=_REACH_S)
            return await question(client)

    return asyncio.run(ask())

"""`harness sessions`: list, show and delete the sessions of a running server, front or router.

Deletions are reported one by one. A name that fits no session, or several, deletes nothing.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli import options, output
from harness.errors import RunError, SessionDamaged, SessionServerError
from harness.server.telemetry.printable import printable
from harness.suite.exits import ExitCode

if TYPE_CHECKING:
    from harness.rollouts.client.session_server import SessionServerClient

app = typer.Typer(no_args_is_help=True, help="List, show and delete sessions of a running server.")


@app.command("list")
def list_(*, server: options.Server, admin_token: options.AdminToken = None, as_json: options.Json = False) -> None:
    """List the sessions on the server."""
    found = options.ask_named(server, admin_token, lambda client: client.sessions())
    lines = [f"{'session':32}  {'phase':8}  turns  in flight"]
    lines += [f"{each.session_id}  {each.phase:8}  {each.turns:5}  {each.turns_in_flight:9}" for each in found]
    output.print_result({"sessions": found}, "\n".join(lines), as_json=as_json)


@app.command("show")
def show(
    session: Annotated[str, typer.Argument(metavar="SESSION", help="Session id, or a prefix of it.")],
    *,
    server: options.Server,
    admin_token: options.AdminToken = None,
    as_json: options.Json = False,
) -> None:
    """Show one session: branches, dialogue, ledger. The same as `harness show --server URL SESSION`."""
    from harness.cli.look.show import show as show_session

    show_session(Path(session), server=server, admin_token=admin_token, as_json=as_json)


@app.command("delete")
def delete(
    session: Annotated[
        list[str], typer.Argument(metavar="SESSION...", help="Session ids, or prefixes of at least 8 characters.")
    ],
    *,
    server: options.Server,
    admin_token: options.AdminToken = None,
    as_json: options.Json = False,
) -> None:
    """Delete sessions from the server; their turns in flight end, and a file store keeps their records.

    Nothing is deleted if a name fits no session or several. Each session is reported: deleted, unknown (a full id that
    the server does not have) or refused; unless all are deleted the exit code is 4, or 6 after a refusal.
    """

    async def delete_all(client: "SessionServerClient") -> list[tuple[str, str, str | None]]:
        known = [each.session_id for each in await client.sessions()]
        found = dict.fromkeys(_find_session(name, known) for name in session)
        return await asyncio.gather(*(_delete(client, each) for each in found))

    ended = options.ask_named(server, admin_token, delete_all)
    document = {
        "deleted": [each for each, end, _ in ended if end == "deleted"],
        "unknown": [each for each, end, _ in ended if end == "unknown"],
        "refused": {each: reason for each, end, reason in ended if end == "refused"},
    }
    lines = (f"{end:8}  {each}" + (f"  {printable(reason)}" if reason else "") for each, end, reason in ended)
    output.print_result(document, "\n".join(lines), as_json=as_json)
    ends = {end for _, end, _ in ended}
    if "refused" in ends:
        raise typer.Exit(ExitCode.INFRASTRUCTURE)
    if "unknown" in ends:
        raise typer.Exit(ExitCode.USAGE)


async def _delete(client: "SessionServerClient", session_id: str) -> tuple[str, str, str | None]:
    """Return the id, `deleted`, `unknown` or `refused`, and the reason of a refusal."""
    try:
        try:
            is_known = (await client.facts(session_id)).phase != "unknown"
        except SessionServerError as error:
            if error.code != SessionDamaged.code:
                raise
            is_known = True  # quarantined; the deletion removes it
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

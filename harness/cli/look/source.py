"""Options of `harness show` and `harness view` that name a run, a store or a server, and its readers."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from harness.errors import RunError

if TYPE_CHECKING:
    from harness.viewer.run_view import RunView
    from harness.viewer.session_view import SessionView

Where = Annotated[
    Path | None, typer.Argument(metavar="RUN", help="A run directory, or the file of a store; none with --server.")
]
Server = Annotated[str | None, typer.Option(metavar="URL", help="Read a session server instead of a run.")]


class Source(NamedTuple):
    look: "Callable[[], RunView]"
    look_inside: "Callable[[str], SessionView]"


def open_source(where: Path | None, server: str | None, admin_token: str | None, tokenizer: Path | None) -> Source:
    """Return the readers of `server`, else of `where`. Raises `ScenarioError` for a bad address, `RunError`."""
    from harness.rollouts.client.connections import SessionServerAddress, server_url
    from harness.viewer.look import look_at, look_at_server, look_into, look_into_all

    if server is not None:
        address = SessionServerAddress(server_url(server), admin_token)
        return Source(partial(look_at_server, address, tokenizer), look_into_all(address))
    if where is None:
        raise RunError("expected a run directory, the file of a store, or --server URL")
    return Source(partial(look_at, where, tokenizer), partial(look_into, where))

"""`harness view`: a run, a store or a server that runs as one page for a browser."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from harness.cli import output

_Where = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN", help="A run directory, or the file of a store; none with --server.", show_default=False
    ),
]
_Out = Annotated[Path, typer.Option("--out", metavar="FILE", help="The page, an HTML file.", show_default=False)]
_Server = Annotated[
    str | None,
    typer.Option("--server", metavar="URL", help="A session server, in the place of a run.", show_default=False),
]
_AdminToken = Annotated[
    str | None, typer.Option(envvar="HARNESS_ADMIN_TOKEN", help="That of --server.", show_default=False)
]
_Tokenizer = Annotated[
    Path | None,
    typer.Option(envvar="HARNESS_TOKENIZER", help="Folder of the tokenizer.  [default: the run's]", show_default=False),
]


def view(
    where: _Where = None,
    *,
    out: _Out,
    server: _Server = None,
    admin_token: _AdminToken = None,
    tokenizer: _Tokenizer = None,
) -> None:
    """Write one page that opens from disk: sessions, timeline, branches, transcripts, every token.

    The run is neither written nor locked, so it may still go on, and what is missing is said.

    Examples: `harness view runs/DIR --out run.html`, `harness view --server URL --out now.html`
    """
    from harness.client.connections import SessionServerAddress, server_url
    from harness.errors import RunError
    from harness.viewer.look import look_at, look_into, open_tokenizer
    from harness.viewer.look_at_server import look_at_server, look_into_all
    from harness.viewer.run_page import write_page

    if where is None and server is not None:
        address = SessionServerAddress(server_url(server), admin_token)
        seen, look_inside = look_at_server(address), look_into_all(address)
    elif where is not None and server is None:
        seen, look_inside = look_at(where), partial(look_into, where)
    else:
        raise RunError("expected one to look at: a run directory, the file of a store, or --server URL")
    size = write_page(out, seen, look_inside, open_tokenizer(seen, tokenizer))
    output.print_text(f"{out}: {len(seen.sessions)} sessions, {size:,} bytes")

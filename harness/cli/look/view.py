"""`harness view`: a run, a store or a running server as a page for a browser, a server also live."""

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli import options, output

if TYPE_CHECKING:
    from harness.rollouts.client.connections import SessionServerAddress

_Where = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN", help="A run directory, or the file of a store; none with --server.", show_default=False
    ),
]
_Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="FILE", help="The page, an HTML file; without it --server is shown live.", show_default=False
    ),
]
_Server = Annotated[
    str | None,
    typer.Option("--server", metavar="URL", help="A session server, in the place of a run.", show_default=False),
]
_Port = Annotated[
    int | None,
    typer.Option(
        "--port", min=0, max=65535, help="Of the live page, on loopback.  [default: a free one]", show_default=False
    ),
]
_AdminToken = Annotated[
    str | None, typer.Option(envvar="HARNESS_ADMIN_TOKEN", help="That of --server.", show_default=False)
]


def view(
    where: _Where = None,
    *,
    out: _Out = None,
    server: _Server = None,
    port: _Port = None,
    admin_token: _AdminToken = None,
    tokenizer: options.ReadsTokens = None,
    as_json: options.Json = False,
) -> None:
    """Write one page that opens from disk, or show a server live: sessions, timeline, branches, transcripts, tokens.

    Writes and locks nothing in the run, so it may still be going on; missing parts are listed. The live page is at the
    printed address, until Ctrl+C.

    Examples: `harness view runs/DIR --out run.html`, `harness view --server URL`
    """
    from harness.errors import RunError
    from harness.rollouts.client.connections import SessionServerAddress, server_url
    from harness.viewer.look import look_at, look_into, open_tokenizer
    from harness.viewer.look_at_server import look_at_server, look_into_all
    from harness.viewer.page.run_page import write_page

    if (where is None) is (server is None):
        raise RunError("expected one to look at: a run directory, the file of a store, or --server URL")
    address = None if server is None else SessionServerAddress(server_url(server), admin_token)
    if out is None:
        if address is None:
            raise RunError("expected --out FILE, the page to write: what is shown live is a server (--server URL)")
        _show_live(address, port or 0, tokenizer, as_json=as_json)
        return
    if port is not None:
        raise RunError("expected --port without --out: a page that is written has no address")
    if address is not None:
        seen, look_inside = look_at_server(address, tokenizer), look_into_all(address)
    else:
        assert where is not None
        seen, look_inside = look_at(where, tokenizer), partial(look_into, where)
    size = write_page(out, seen, look_inside, open_tokenizer(seen))
    if as_json:
        output.print_json({"out": str(out), "sessions": len(seen.sessions), "bytes": size})
    else:
        output.print_text(f"{out}: {len(seen.sessions)} sessions, {size:,} bytes")


def _show_live(address: "SessionServerAddress", port: int, tokenizer: Path | None, *, as_json: bool) -> None:
    import asyncio

    from harness.viewer.live.live_page import serve_live_until_told

    def announce(url: str) -> None:
        if as_json:
            output.print_json({"url": url, "server": address.url})
        else:
            output.print_text(f"{url} shows {address.url}; Ctrl+C ends it")
        sys.stdout.flush()

    asyncio.run(serve_live_until_told(address, tokenizer, port=port, started=announce))

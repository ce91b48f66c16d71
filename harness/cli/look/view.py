"""`harness view`: a run, a store or a running server as a page for a browser, a server also live."""

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli import options, output
from harness.cli.look.show import Server, Where, open_source
from harness.errors import RunError

if TYPE_CHECKING:
    from harness.rollouts.client.connections import SessionServerAddress

_Out = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The page, an HTML file; without it --server is shown live.")
]
_Port = Annotated[
    int | None, typer.Option(min=0, max=65535, help="Port of the live page, on loopback.  [default: a free one]")
]


def view(
    where: Where = None,
    *,
    out: _Out = None,
    server: Server = None,
    port: _Port = None,
    admin_token: options.AdminToken = None,
    tokenizer: options.ReadsTokens = None,
    as_json: options.Json = False,
) -> None:
    """Write one page that opens from disk, or show a server live: sessions, timeline, branches, transcripts, tokens.

    Writes and locks nothing in the run, so it may still be going on; missing parts are listed. The live page is at the
    printed address, until Ctrl+C.

    Examples: `harness view runs/DIR --out run.html`, `harness view --server URL`
    """
    from harness.rollouts.client.connections import SessionServerAddress, server_url
    from harness.viewer.look import open_tokenizer
    from harness.viewer.page.run_page import Side, write_page

    if (where is None) is (server is None):
        raise RunError("expected a run directory, the file of a store, or --server URL")
    if out is None:
        if server is None:
            raise RunError("expected --out FILE: only a server (--server URL) is shown live")
        _show_live(SessionServerAddress(server_url(server), admin_token), port or 0, tokenizer, as_json=as_json)
        return
    if port is not None:
        raise RunError("expected --port or --out, got both: a written page has no address")
    source = open_source(where, server, admin_token, tokenizer)
    seen = source.look()
    size = write_page(out, Side(seen, source.look_inside, open_tokenizer(seen)))
    document = {"out": str(out), "sessions": len(seen.sessions), "bytes": size}
    output.print_result(document, f"{out}: {len(seen.sessions)} sessions, {size:,} bytes", as_json=as_json)


def open_last(*, as_json: options.Json = False) -> None:
    """Write the page of the newest run in `runs/` next to the run, and open it in a browser."""
    import webbrowser

    from harness.suite.record.rundir import newest_run

    run = newest_run()
    page = run.with_name(f"{run.name}.html")
    view(run, out=page, as_json=as_json)
    if not webbrowser.open(page.resolve().as_uri()):
        output.say(f"no browser opened; open {page} yourself")


def _show_live(address: "SessionServerAddress", port: int, tokenizer: Path | None, *, as_json: bool) -> None:
    from harness.viewer.live.live_page import serve_live_until_told

    def announce(url: str) -> None:
        said = f"{url} shows {address.url}; Ctrl+C stops"
        output.print_result({"url": url, "server": address.url}, said, as_json=as_json)
        sys.stdout.flush()

    asyncio.run(serve_live_until_told(address, tokenizer, port=port, started=announce))

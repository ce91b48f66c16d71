"""`harness show`, `view` and `open`: a run, a store or a running server, on the terminal or as a page, also live."""

import asyncio
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from harness.cli import options, output
from harness.errors import RunError

if TYPE_CHECKING:
    from harness.rollouts.client.connections import SessionServerAddress
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


_Session = Annotated[
    str | None,
    typer.Argument(metavar="SESSION", help="Number of a session, or a prefix of its id.  [default: all sessions]"),
]
_Turn = Annotated[int | None, typer.Option(min=0, help="This turn alone.")]
_Tokens = Annotated[bool, typer.Option("--tokens", help="Every sampled token: text, logprob, version, where it went.")]


def show(
    where: Where = None,
    session: _Session = None,
    *,
    server: Server = None,
    admin_token: options.AdminToken = None,
    turn: _Turn = None,
    tokens: _Tokens = False,
    tokenizer: options.ReadsTokens = None,
    as_json: options.Json = False,
) -> None:
    """Show how a run ended, or one of its sessions: outcome and reason, branches, dialogue, tokens, ledger.

    Writes and locks nothing, so the run may still be going on; missing parts are listed.

    Examples: `harness show runs/DIR`, `harness show runs/DIR 3 --turn 2 --tokens`, `harness show --server URL 5f0c`
    """
    from harness.viewer import terminal
    from harness.viewer.look import open_tokenizer
    from harness.viewer.run_view import say_missing
    from harness.viewer.session_view import unknown_ids

    session = session if server is None else _behind_server(where, session)
    source = open_source(where, server, admin_token, tokenizer)
    if session is None and (turn is not None or tokens):
        raise RunError("expected a session with --turn and --tokens: its number, or the beginning of its id")
    view = source.look()
    if session is None:
        if as_json:
            output.print_json(view)
        else:
            terminal.show(*terminal.run_overview(view))
        return
    line = view.find(session)
    seen, missing = None, list(view.missing)
    if line.session_id is not None:
        with say_missing("its turns", missing):  # the run says how it ended all the same
            seen = source.look_inside(line.session_id)
    if turn is not None and seen is not None and not any(each.index == turn for each in seen.turns):
        raise RunError(f"session {session} has no turn {turn}: it has {len(seen.turns)}")
    shown = [] if seen is None else [each for each in seen.turns if turn is None or each.index == turn]
    reads = open_tokenizer(view) if tokens or any(map(terminal.is_partial, shown)) else None
    if tokens:
        with say_missing("the text of tokens", missing):
            missing += unknown_ids(shown, reads)
    if as_json:
        document = {"line": line, "missing": missing}
        whole = None
        with say_missing("its turns", missing):
            all_of_it = document | {"session": seen}
            if tokens:
                all_of_it["tokens"] = {each.index: [token._asdict() for token in each.tokens(reads)] for each in shown}
            whole = output.json_text(all_of_it)  # which a value that is nested too deeply has none of
        output.print_text(whole or output.json_text(document | {"session": None}))
        return
    parts = [*terminal.session_overview(line, seen, turn, missing, reads)]
    if tokens:
        parts += [
            terminal.by_itself(f"the tokens of turn {each.index}", terminal.token_table, each, reads) for each in shown
        ]
    terminal.show(*parts)


def _behind_server(where: Path | None, session: str | None) -> str | None:
    """Return the session that the first argument names with `--server`. Raises `RunError` for two."""
    if session is not None:
        raise RunError(f"expected one session behind --server, got {where} and {session}")
    return None if where is None else str(where)


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

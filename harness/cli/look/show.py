"""`harness show`: a run, a store, a running server, or one of its sessions, on the terminal.

Its options that name these, and their readers, are those of `harness view`, too.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from harness.cli import options, output
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
    from harness.viewer.damaged_run import say_missing
    from harness.viewer.look import open_tokenizer
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

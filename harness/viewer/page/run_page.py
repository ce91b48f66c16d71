"""A run as one HTML file that opens from disk, with markup, style, script and the recorded data as JSON.

Recorded text is data, never markup: it is in script elements of a type that browsers do not run, in ASCII with `<`, `>`
and `&` escaped, and the script shows it as text. The content security policy admits only this script and style, by
digest. A live page is the same, but begins empty and requests its data.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from harness.errors import RunError
from harness.machine.disk import replacing
from harness.tokens.tokenizer import Tokenizer
from harness.types import Json
from harness.viewer.damaged_run import say_missing
from harness.viewer.page.page_data import (
    MOST_BANDS,
    MOST_GONE,
    TokenTable,
    finite,
    ledger_text,
    line_data,
    session_data,
)
from harness.viewer.run_view import RunView
from harness.viewer.session_view import SessionView

_PARTS = Path(__file__).parent
# Joined in this order: each part uses those before it.
_SCRIPTS = ("data", "windowed", "sessions", "timeline", "session", "tokens", "live", "keys")
_BEGINNING = "<!doctype html>"


def write_page(
    path: Path, view: RunView, look_inside: Callable[[str], SessionView], tokenizer: Tokenizer | None
) -> int:
    """Write the page of `view` to `path`, session by session. Return its length in bytes.

    `look_inside` reads a session by id; the page reports one that cannot be read. Raises `RunError` if `path` cannot be
    written or holds something other than a page. `path` never holds a partial page.
    """
    if path.is_dir() or (path.exists() and not _is_page(path)):
        raise RunError(f"expected a place for the page, found something else at {path}: name another file with --out")
    try:
        with replacing(path) as file:
            for piece in page_pieces(view, look_inside, tokenizer):
                file.write(piece)
        return path.stat().st_size
    except OSError as error:
        raise RunError(f"expected a place for the page, cannot write {path}: {error.strerror}") from error


def page_pieces(view: RunView, look_inside: Callable[[str], SessionView], tokenizer: Tokenizer | None) -> Iterator[str]:
    """Yield the page of `view` in pieces of one session."""
    script = _script()
    yield _head(script, "")
    table, missing = TokenTable(), list(view.missing)
    lines: list[Json] = []
    for place, line in enumerate(view.sessions):
        element, times = None, list[Sequence[object]]()
        if line.session_id is not None:
            with say_missing(f"session {line.session_id}", missing):
                session = look_inside(line.session_id)
                data = _data(f"s{place}", session_data(session, tokenizer, table))
                times = [[turn.created_at, turn.seconds, turn.status, turn.index] for turn in session.turns]
                json.dumps(times, allow_nan=False)
                element = f"s{place}"
                yield data
        lines.append(line_data(line, element, times if element else []))
    if tokenizer is not None:
        missing += [f"the text of id {token_id}, which is not in this tokenizer" for token_id in table.unread()]
    run = {
        "source": view.source,
        "suite": view.suite,
        "status": view.status,
        "starts": view.starts,
        "ledger": view.ledger and ledger_text(view.ledger),
        "bands": [asdict(band) for band in view.bands],
        "missing": missing,
        "sessions": lines,
        "live": False,
    }
    yield _data("run", finite(run))
    yield _data("texts", table.rows)
    yield _foot(script)


def live_page(source: str) -> str:
    """Return the page that requests its data from the server `source`."""
    script = _script()
    empty: Json = dict.fromkeys(("suite", "status", "ledger")) | {"starts": [], "bands": [], "missing": []}
    most = {"most_gone": MOST_GONE, "most_bands": MOST_BANDS}
    run = {**empty, **most, "source": source, "sessions": [], "live": True}
    return _head(script, " connect-src 'self';") + _data("run", run) + _data("texts", []) + _foot(script)


def _script() -> str:
    return "\n".join((_PARTS / f"{name}.js").read_text("utf-8") for name in _SCRIPTS)


def _head(script: str, admitted: str) -> str:
    style, body = ((_PARTS / name).read_text("utf-8") for name in ("page.css", "page.html"))
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}';{admitted}"
        " base-uri 'none'; form-action 'none'"
    )
    return (
        f'{_BEGINNING}\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>harness view</title>\n<style>{style}</style></head>\n<body>\n{body}"
    )


def _foot(script: str) -> str:
    return f"<script>{script}</script>\n</body></html>\n"


def _is_page(path: Path) -> bool:
    # A store or source that was named by mistake is not overwritten.
    with suppress(OSError), path.open("rb") as file:
        return file.read(len(_BEGINNING)) == _BEGINNING.encode()
    return False


def _data(name: str, value: object) -> str:
    # The escapes keep text from ending the element and from changing its direction in an editor.
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), default=str)
    text = text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    return f'<script type="application/json" id="{name}">{text}</script>\n'


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"

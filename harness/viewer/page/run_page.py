"""One or two runs as one HTML file that opens from disk, with markup, style, script and the recorded data as JSON.

Recorded text is data, never markup: it is in script elements of a type that browsers do not run, in ASCII with `<`, `>`
and `&` escaped, and the script shows it as text. The content security policy admits only this script and style, by
digest. A live page is the same, but begins empty and requests its data.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from shlex import join
from typing import NamedTuple

from harness.errors import RunError
from harness.machine.disk import begins_with, replacing
from harness.rollouts.agents.agent_output import read_tail
from harness.tokens.tokenizer import Tokenizer
from harness.types import Json
from harness.viewer.page.page_data import (
    MOST_BANDS,
    MOST_GONE,
    TokenTable,
    finite,
    ledger_text,
    line_data,
    session_data,
    session_marks,
)
from harness.viewer.run_view import RunView, SessionLine, say_missing
from harness.viewer.session_view import SessionView

_PARTS = Path(__file__).parent
# Joined in this order: each part uses those before it.
_SCRIPTS = (
    *("data", "windowed", "filters", "sessions", "overview", "timeline", "session", "family", "conversation"),
    *("tokens", "raw", "compare", "live", "keys"),
)
_BEGINNING = "<!doctype html>"
_MOST_BYTES = 500_000_000  # browsers hold no longer text
_ROOM_BYTES = 400_000_000
"""Turns and logs of a page. A run beyond is not read."""


class Side(NamedTuple):
    """A run in a page, with the reader of its sessions by id."""

    view: RunView
    look_inside: Callable[[str], SessionView]
    tokenizer: Tokenizer | None


def write_page(path: Path, *sides: Side, pairs: Sequence[tuple[SessionLine, SessionLine]] = ()) -> int:
    """Write the page of one run, or two side by side, to `path`, session by session. Return its length in bytes.

    `pairs` are sessions of both sides to compare. The page reports a session that cannot be read. Raises `RunError` if
    `path` cannot be written, holds something other than a page, or would be longer than a browser can open. `path`
    never holds a partial page.
    """
    if path.is_dir() or (path.exists() and not begins_with(path, _BEGINNING)):
        raise RunError(f"expected a place for the page, found something else at {path}: name another file with --out")
    size = 0
    try:
        with replacing(path) as file:
            for piece in page_pieces(sides, pairs):
                size += len(piece)
                if size > _MOST_BYTES:
                    raise RunError(
                        f"expected a page of {_MOST_BYTES // 1_000_000} MB at most, which browsers open; that of"
                        f" {sides[0].view.source} is longer: look at one session with `{sides[0].view.command} SESSION`"
                    )
                file.write(piece)
        return path.stat().st_size
    except OSError as error:
        raise RunError(f"expected a place for the page, cannot write {path}: {error.strerror}") from error


def page_pieces(
    sides: Sequence[Side], pairs: Sequence[tuple[SessionLine, SessionLine]], room_bytes: int = _ROOM_BYTES
) -> Iterator[str]:
    """Yield the page in pieces of one session. Those without room are listed only, and the page says so."""
    script = _script()
    yield _head(script, "")
    table, missing = TokenTable(), list[str]()
    lines: list[Json] = []
    places: dict[int, int] = {}
    for number, side in enumerate(sides):
        missing += side.view.missing
        room, listed_only = room_bytes // len(sides), 0
        for line in side.view.sessions:
            place = places[id(line)] = len(lines)
            data = {**line_data(line, None, []), "side": number}
            lines.append(data)
            if room <= 0:
                listed_only += 1
                continue
            if line.session_id is not None:
                with say_missing(f"session {line.session_id}", missing):
                    session = side.look_inside(line.session_id)
                    piece = _data(f"s{place}", session_data(session, side.tokenizer, table))
                    times = [[turn.created_at, turn.seconds, turn.status, turn.index] for turn in session.turns]
                    json.dumps(times, allow_nan=False)
                    data |= {**line_data(line, f"s{place}", times), **session_marks(session)}
                    room -= len(piece)
                    yield piece
            if line.agent_log is not None:
                with say_missing(f"the log {line.agent_log}", missing):
                    piece = _data(f"log{place}", read_tail(line.agent_log))
                    room -= len(piece)
                    yield piece
        if listed_only:
            missing.append(
                f"turns and logs of the last {listed_only} sessions: the page is full, look at one with"
                f" `{side.view.command} SESSION`"
            )
    for one, other in pairs:
        first, second = places[id(one)], places[id(other)]
        lines[first]["partner"], lines[second]["partner"] = second, first
    if any(side.tokenizer for side in sides):
        missing += [f"the text of id {token_id}, which is not in this tokenizer" for token_id in table.unread()]
    run = {
        "source": " and ".join(side.view.source for side in sides),
        "suite": " and ".join(dict.fromkeys(side.view.suite for side in sides if side.view.suite)),
        "status": " and ".join(dict.fromkeys(side.view.status for side in sides if side.view.status)),
        "said": [sentence for side in sides for sentence in _said(side.view)],
        "bands": [asdict(band) for band in chain.from_iterable(side.view.bands for side in sides)],
        "steps": [side.view.steps for side in sides],
        "audits": [side.view.audit["groups"] for side in sides if side.view.audit],
        "missing": missing,
        "sessions": lines,
        "superseded": [
            {**line_data(line, None, []), "side": number}
            for number, side in enumerate(sides)
            for line in side.view.superseded
        ],
        "sides": len(sides),
        "live": False,
    }
    yield _data("run", finite(run))
    yield _data("texts", table.rows)
    yield _foot(script)


def _said(view: RunView) -> Iterator[str]:
    yield from (join(map(str, start["command"])) for start in view.starts)
    if view.ledger:
        yield f"ledger: {ledger_text(view.ledger)}"
    yield from (f"audit: {verdict}" for verdict in view.audit.get("verdicts", ()))


def live_page(source: str) -> str:
    """Return the page that requests its data from the server `source`."""
    script = _script()
    empty: Json = {name: [] for name in ("said", "bands", "steps", "audits", "missing", "sessions", "superseded")}
    most = {"most_gone": MOST_GONE, "most_bands": MOST_BANDS}
    run = {**empty, **most, "source": source, "suite": "", "status": "", "sides": 1, "live": True}
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
        '<meta name="viewport" content="width=device-width">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>harness view</title>\n<style>{style}</style></head>\n<body>\n{body}"
    )


def _foot(script: str) -> str:
    return f"<script>{script}</script>\n</body></html>\n"


def _data(name: str, value: object) -> str:
    # The escapes keep text from ending the element and from changing its direction in an editor.
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), default=str)
    text = text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    return f'<script type="application/json" id="{name}">{text}</script>\n'


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"

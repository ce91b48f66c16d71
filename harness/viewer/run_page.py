"""A run as one page that opens from disk: markup, style and script in one file, and what was recorded as JSON in it.

What was recorded is data and never markup: it stands in script elements of a type that browsers do not run, in ASCII
with `<`, `>` and `&` escaped, and the page's script shows it as text. The content security policy admits that script
and that style by their digests, and nothing from anywhere else. A session's tokens are columns of 4-byte little-endian
numbers in base64, which the page decodes when the session is opened; the texts of tokens stand once in a table.
"""

import base64
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from harness.errors import RunError
from harness.machine.disk import replacing
from harness.sessions.ledger import Ledger
from harness.tokens.incremental import IncrementalDecoder
from harness.tokens.tokenizer import Tokenizer
from harness.types import Json
from harness.viewer.damage import say_missing
from harness.viewer.run_view import RunView, SessionLine
from harness.viewer.session_view import SessionView, TurnView
from harness.viewer.terminal import ledger_words, message_text

_PARTS = Path(__file__).with_name("page")
_SCRIPTS = ("data", "windowed", "sessions", "timeline", "session", "tokens", "keys")
"""In this order one script, of which each part knows those before it."""
_BEGINNING = "<!doctype html>"


class _TokenTable:
    """Every pair of an id and a text that occurs, once: `rows` in order of their numbers."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, str | None]] = []
        self._numbers: dict[tuple[int, str | None], int] = {}

    def number(self, token_id: int, text: str | None) -> int:
        row = (token_id, text)
        number = self._numbers.setdefault(row, len(self.rows))
        if number == len(self.rows):
            self.rows.append(row)
        return number


def write_page(
    path: Path, view: RunView, look_inside: Callable[[str], SessionView], tokenizer: Tokenizer | None
) -> int:
    """Write the page of `view` to `path`, one session after the other; its length in bytes.

    `look_inside` reads a session by its id; one that cannot be read is said in the page. A page that is not whole is
    never at `path`. Raises `RunError` when it cannot be written, or something else than a page is there.
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
    """The page of `view`, in pieces of a session each."""
    style, body = ((_PARTS / name).read_text("utf-8") for name in ("page.css", "page.html"))
    script = "\n".join((_PARTS / f"{name}.js").read_text("utf-8") for name in _SCRIPTS)
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}';"
        " base-uri 'none'; form-action 'none'"
    )
    yield (
        f'{_BEGINNING}\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>harness view</title>\n<style>{style}</style></head>\n<body>\n{body}"
    )
    table, missing = _TokenTable(), list(view.missing)
    lines: list[Json] = []
    for place, line in enumerate(view.sessions):
        element, times = None, list[Sequence[object]]()
        if line.session_id is not None:
            with say_missing(f"session {line.session_id}", missing):
                session = look_inside(line.session_id)
                data = _data(f"s{place}", _session(session, tokenizer, table))
                times = [[turn.created_at, turn.seconds, turn.status, turn.index] for turn in session.turns]
                json.dumps(times, allow_nan=False)
                element = f"s{place}"
                yield data
        lines.append(_line(line, element, times if element else []))
    run = {
        "source": view.source,
        "suite": view.suite,
        "status": view.status,
        "starts": view.starts,
        "ledger": view.ledger and _ledger(view.ledger),
        "bands": [asdict(band) for band in view.bands],
        "missing": missing,
        "sessions": lines,
    }
    yield _data("run", _finite(run))
    yield _data("texts", table.rows)
    yield f"<script>{script}</script>\n</body></html>\n"


def _is_page(path: Path) -> bool:
    """A store or a source that is named by mistake is none, and is not lost."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(len(_BEGINNING)) == _BEGINNING.encode()
    return False


def _data(name: str, value: object) -> str:
    """A script element that is data: no text in it can end it, or be a mark of direction to an editor."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), default=str)
    text = text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    return f'<script type="application/json" id="{name}">{text}</script>\n'


def _finite(value: Any) -> Any:
    """`value` with words in the place of numbers that JSON does not have, which a record may have all the same."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _line(line: SessionLine, element: str | None, times: Sequence[Sequence[object]]) -> Json:
    return {
        "element": element,
        "id": line.session_id,
        "number": line.number,
        "scenario": line.scenario,
        "outcome": line.outcome,
        "cause": line.cause,
        "why": line.last_words or line.detail,
        "log": None if line.agent_log is None else str(line.agent_log),
        "turns": len(times) if line.turns is None and element is not None else line.turns,
        "sampled": line.sampled,
        "reward": line.reward,
        "times": times,
    }


def _session(session: SessionView, tokenizer: Tokenizer | None, table: _TokenTable) -> Json:
    return {
        "id": session.session_id,
        "phase": session.phase,
        "in_flight": session.turns_in_flight,
        "refusals": session.refusals,
        "ledger": session.ledger and _ledger(session.ledger),
        "turns": [_turn(turn, depth, tokenizer, table) for turn, depth in session.walk()],
    }


def _ledger(ledger: Json) -> str:
    return ledger_words(msgspec.convert(ledger, Ledger))


def _turn(turn: TurnView, depth: int, tokenizer: Tokenizer | None, table: _TokenTable) -> Json:
    decoder = None if tokenizer is None else IncrementalDecoder(tokenizer.decode)
    context = ((token_id, None if decoder is None else decoder.push([token_id])) for token_id in turn.context_ids)
    logprobs: list[float] = []

    def outputs() -> Iterator[tuple[int, str | None]]:
        for token in turn.tokens(tokenizer):
            logprobs.append(float("nan") if token.logprob is None else token.logprob)
            yield token.token_id, token.text

    numbers = [table.number(token_id, text) for token_id, text in chain(context, outputs())]
    return {
        "index": turn.index,
        "depth": depth,
        "status": turn.status,
        "end": turn.end,
        "prompt": turn.prompt_length,
        "sampled": turn.output_length,
        "fate": turn.fate,
        "fates": turn.fates,
        "unknown": turn.unknown,
        "versions": turn.versions,
        "masked_from": turn.masked_from,
        "seconds": turn.seconds,
        "words": list(_words(turn)),
        "context": len(turn.context_ids),
        "tokens": base64.b64encode(np.asarray(numbers, "<u4").tobytes()).decode(),
        "logprobs": base64.b64encode(np.asarray(logprobs, "<f4").tobytes()).decode(),
    }


def _words(turn: TurnView) -> Iterator[tuple[str, str]]:
    """Who said what: the messages of the request, the reply, and the error."""
    for message in turn.messages:
        yield str(message.get("role")), message_text(message)
    if turn.reply.get("reasoning_content"):
        yield "reasoning", str(turn.reply["reasoning_content"])
    yield "assistant", message_text(turn.reply)
    if turn.error is not None:
        yield "error", f"{turn.error.get('code')}: {turn.error.get('message')}"

"""Recorded data as the page's script reads it: JSON, with token columns in base64.

The columns are little-endian, decoded when tokens are looked at. Token texts are stored once in a table, and columns
hold their numbers, in 2 bytes each where these suffice: a browser's time to open a page is that of its bytes.
"""

import base64
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np

from harness.decoding import convert
from harness.sessions.ledger import Ledger
from harness.tokens.incremental import IncrementalDecoder
from harness.tokens.tokenizer import Tokenizer
from harness.types import Json
from harness.viewer.run_view import SessionLine, end_words, inheritance_facts
from harness.viewer.session_view import SessionView, TurnView
from harness.viewer.terminal import ledger_words

MOST_GONE = 1_000
"""Most sessions that a live page shows after their server dropped them."""
MOST_BANDS = 1_000
"""Most finished bands of a live page."""

# Under the names of `SessionLine` and `TurnView`.
_OF_LINES = ("number", "scenario", "group", "inherits", "forked_at", "cause", "sampled", "reward")
_OF_TURNS = (
    *("index", "parent", "role", "evidence", "inherited", "asked_again", "status", "end", "fate", "fates", "unknown"),
    *("versions", "masked_from", "seconds", "attempts", "messages", "reply", "asked", "toolset", "tools"),
)


class TokenTable:
    """Distinct pairs of id and text. `rows` is in order of their numbers."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, str | None]] = []
        self._numbers: dict[tuple[int, str | None], int] = {}

    def number(self, token_id: int, text: str | None) -> int:
        row = (token_id, text)
        number = self._numbers.setdefault(row, len(self.rows))
        if number == len(self.rows):
            self.rows.append(row)
        return number

    def unread(self) -> Iterator[int]:
        """Yield the first id without a text, if any."""
        yield from islice((token_id for token_id, text in self.rows if text is None), 1)


def finite(value: Any) -> Any:
    """Replace numbers that JSON cannot hold by words."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {name: finite(each) for name, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, list | tuple) else value


def line_data(line: SessionLine, element: str | None, times: Sequence[Sequence[object]]) -> Json:
    """Return the data of a session in the list. `element` has its turns, if readable."""
    return {
        **{name: getattr(line, name) for name in _OF_LINES},
        "element": element,
        "id": line.session_id,
        "outcome": line.outcome or line.state,
        "why": line.last_words or line.detail,
        "log": None if line.agent_log is None else str(line.agent_log),
        "turns": len(times) if line.turns is None and element is not None else line.turns,
        "figures": {**line.score.get("figures", {}), **line.score.get("details", {})},
        "reason": str(line.score.get("reason") or line.score_error or ""),
        "times": times,
    }


def session_marks(session: SessionView) -> Json:
    """Return what the list of sessions is filtered by, and how the session left its record."""
    fates: Counter[str] = Counter()
    for turn in session.turns:
        fates.update(turn.fates)
    return {
        "left": _left(session),
        "roles": sorted({turn.role for turn in session.turns}),
        "versions": [*dict.fromkeys(str(span["version"]) for turn in session.turns for span in turn.versions)],
        "fates": fates,
    }


def session_data(session: SessionView, tokenizer: Tokenizer | None, table: TokenTable) -> Json:
    turns = [
        {**turn_data(turn), "depth": depth, **token_columns(turn, tokenizer, table)} for turn, depth in session.walk()
    ]
    return {**session_facts(session), "turns": turns}


def session_facts(session: SessionView) -> Json:
    return {
        "id": session.session_id,
        "phase": session.phase,
        "in_flight": session.turns_in_flight,
        "refusals": session.refusals,
        "remarks": session.remarks,
        "metadata": session.metadata,
        "kin": [*inheritance_facts(session.inherits)],
        "left": _left(session),
        "ledger": session.ledger and ledger_text(session.ledger),
    }


def _left(session: SessionView) -> str:
    return end_words(session.inherits) if session.inherits else ""


def ledger_text(ledger: Json) -> str:
    return ledger_words(convert(ledger, Ledger))


def turn_data(turn: TurnView) -> Json:
    """Return a turn without its tokens and its place in the tree."""
    return {
        **{name: getattr(turn, name) for name in _OF_TURNS},
        "prompt": turn.prompt_length,
        "sampled": turn.output_length,
        "error": None if turn.error is None else f"{turn.error.get('code')}: {turn.error.get('message')}",
    }


def token_columns(turn: TurnView, tokenizer: Tokenizer | None, table: TokenTable) -> Json:
    """Return the token columns of a turn: context, then output with logprobs."""
    decoder = None if tokenizer is None else IncrementalDecoder(tokenizer.decode, tokenizer.byte_ids)

    def text_of(token_id: int) -> str | None:
        return decoder.push([token_id]) if decoder and tokenizer and token_id in tokenizer else None

    context = ((token_id, text_of(token_id)) for token_id in turn.context_ids)
    logprobs: list[float] = []

    def outputs() -> Iterator[tuple[int, str | None]]:
        for token in turn.tokens(tokenizer):
            logprobs.append(float("nan") if token.logprob is None else token.logprob)
            yield token.token_id, token.text

    numbers = [table.number(token_id, text) for token_id, text in chain(context, outputs())]
    dtype = "<u2" if max(numbers, default=0) < 1 << 16 else "<u4"
    return {
        "context": len(turn.context_ids),
        "tokens": base64.b64encode(np.asarray(numbers, dtype).tobytes()).decode(),
        "logprobs": base64.b64encode(np.asarray(logprobs, "<f4").tobytes()).decode(),
    }

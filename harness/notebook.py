"""Cards: values as small HTML for notebooks, readable on light and dark, without a script."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import groupby, islice

TOKENS = {"context": "#9ca3af", "masked": "#d97706", "trained": "#2563eb"}
"""Color of a token by what it is; `context` is not sampled."""

_MOST_TEXT = 1_000  # characters
_MOST_ROWS = 20
_MOST_RUNS = 500
# Gray on both themes. Everything else inherits the notebook's colors.
_LINE = "1px solid rgba(127, 127, 127, .4)"
_CELL = f'style="text-align: left; vertical-align: top; white-space: pre-wrap; padding: 2px 8px; border-top: {_LINE}"'


def card(title: str, facts: Mapping[str, object], *parts: str) -> str:
    """Return a card with a title, the facts that are not None, and HTML of this module below."""
    shown = " · ".join(f"{_text(name)} <b>{_text(value)}</b>" for name, value in facts.items() if value is not None)
    box = f"border: {_LINE}; border-radius: 6px; padding: 8px 12px; max-width: 60rem; overflow-x: auto"
    return f'<div style="{box}"><b>{_text(title)}</b><div>{shown}</div>{"".join(parts)}</div>'


def token_bar(kinds: Iterable[str]) -> str:
    """Return a bar of all tokens in order, each of a kind of `TOKENS`, with a legend."""
    runs = [(kind, sum(1 for _ in tokens)) for kind, tokens in groupby(kinds)]
    drawn = runs if len(runs) <= _MOST_RUNS else _totals(runs)
    bar = "".join(
        f'<span title="{count} {kind}" style="flex: {count}; background: {TOKENS[kind]}"></span>'
        for kind, count in drawn
    )
    legend = " ".join(
        f'<span style="border-left: 10px solid {TOKENS[kind]}; padding-left: 4px">{count:,} {kind}</span>'
        for kind, count in _totals(runs)
    )
    return f'<div style="display: flex; height: 12px; margin: 6px 0">{bar}</div><small>{legend}</small>'


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a folded table of the first rows."""
    names = "".join(f"<th {_CELL}>{_text(name)}</th>" for name in head)
    lines = "".join(
        f"<tr>{''.join(f'<td {_CELL}>{_text(cell)}</td>' for cell in row)}</tr>" for row in islice(rows, _MOST_ROWS)
    )
    count = f"{len(rows):,}" if len(rows) <= _MOST_ROWS else f"{_MOST_ROWS} of {len(rows):,}"
    return f"<details><summary>{count} rows</summary><table><tr>{names}</tr>{lines}</table></details>"


def _totals(runs: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    listed = list(runs)
    totals = ((kind, sum(count for each, count in listed if each == kind)) for kind in TOKENS)
    return [(kind, count) for kind, count in totals if count]


def _text(value: object) -> str:
    # Foreign text must neither be markup nor turn the direction of what follows.
    text = f"{value:.3f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
    cut = text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}..."
    return escape("".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in cut))

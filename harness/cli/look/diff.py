"""`harness diff`: two runs side by side, or two sessions."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from harness.cli import options, output
from harness.errors import RunError

_What = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN [SESSION] RUN [SESSION]",
        help="Two run directories or stores, each followed by a session to compare two sessions.",
    ),
]
_Out = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with both side by side.")]


def diff(
    what: _What, *, out: _Out = None, tokenizer: options.ReadsTokens = None, as_json: options.Json = False
) -> None:
    """Compare outcomes, rewards, tokens and ledgers of two runs, and show where each pair of sessions diverges.

    Rollouts are paired by scenario, prompt and position in the group. Exits with 0 even if the runs differ.

    Examples: `harness diff runs/A runs/B`, `harness diff runs/A 3 runs/B 3`
    """
    from harness.viewer import terminal
    from harness.viewer.diff import compare_runs, compare_sessions
    from harness.viewer.diff_overview import run_diff_overview, session_diff_overview

    document: object
    match what:
        case [first, second] | [first, _, second, _] if out is not None:
            size = _write_page(out, Path(first), Path(second), what[1::2] if len(what) > 2 else [], tokenizer)
            output.print_result({"out": str(out), "bytes": size}, f"{out}: {size:,} bytes", as_json=as_json)
            return
        case [first, second]:
            runs = compare_runs(Path(first), Path(second), tokenizer)
            document, parts = runs, run_diff_overview(runs)
        case [first, one, second, other]:
            pair, missing = compare_sessions((Path(first), one), (Path(second), other), tokenizer)
            document = {"pair": pair, "missing": missing}
            parts = session_diff_overview(pair, missing)
        case _:
            raise RunError(f"expected RUN RUN, or RUN SESSION RUN SESSION, got {len(what)} arguments")
    if as_json:
        output.print_json(document)
    else:
        terminal.show(*parts)


def _write_page(out: Path, first: Path, second: Path, names: Sequence[str], tokenizer: Path | None) -> int:
    """Write the page of both runs, or of the sessions `names` of them. Return its length in bytes."""
    from harness.viewer.diff import pair_lines
    from harness.viewer.look import look_at, look_into, open_tokenizer
    from harness.viewer.page.run_page import Side, write_page

    sides = [Side(look_at(path, tokenizer), partial(look_into, path), None) for path in (first, second)]
    if names:
        found = [replace(side.view, sessions=[side.view.find(name)]) for side, name in zip(sides, names, strict=True)]
        sides = [side._replace(view=view) for side, view in zip(sides, found, strict=True)]
    ones, others = (side.view.sessions for side in sides)
    pairs = list(zip(ones, others, strict=True)) if names else pair_lines(ones, others)
    return write_page(out, *(side._replace(tokenizer=open_tokenizer(side.view)) for side in sides), pairs=pairs)

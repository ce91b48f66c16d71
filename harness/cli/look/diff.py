"""`harness diff`: two runs side by side, or two sessions."""

from pathlib import Path
from typing import Annotated

import typer

from harness.cli import options, output

_What = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN [SESSION] RUN [SESSION]",
        help="Two run directories or stores; each with a session of it, for two sessions.",
        show_default=False,
    ),
]


def diff(what: _What, *, tokenizer: options.ReadsTokens = None, as_json: options.Json = False) -> None:
    """Compare outcomes, rewards, tokens and ledgers of two runs, and show where each pair of sessions diverges.

    Rollouts are paired by scenario, prompt and position in the group. Exits with 0 after comparing, whatever differs.

    Examples: `harness diff runs/A runs/B`, `harness diff runs/A 3 runs/B 3`
    """
    from msgspec import to_builtins

    from harness.errors import RunError
    from harness.viewer import terminal
    from harness.viewer.diff import compare_runs, compare_sessions
    from harness.viewer.diff_overview import run_diff_overview, session_diff_overview

    match what:
        case [first, second]:
            runs = compare_runs(Path(first), Path(second), tokenizer)
            document, parts = to_builtins(runs, enc_hook=str), run_diff_overview(runs)
        case [first, one, second, other]:
            pair, missing = compare_sessions((Path(first), one), (Path(second), other), tokenizer)
            document = {"pair": to_builtins(pair, enc_hook=str), "missing": missing}
            parts = session_diff_overview(pair, missing)
        case _:
            raise RunError(f"expected RUN RUN, or RUN SESSION RUN SESSION, got {len(what)} arguments")
    if as_json:
        output.print_json(document)
    else:
        terminal.show(*parts)

"""`harness view`: a run or a store as one page for a browser."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from harness.cli import output

_Where = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or the file of a store.")]
_Out = Annotated[Path, typer.Option("--out", metavar="FILE", help="The page, an HTML file.", show_default=False)]
_Tokenizer = Annotated[
    Path | None,
    typer.Option(envvar="HARNESS_TOKENIZER", help="Folder of the tokenizer.  [default: the run's]", show_default=False),
]


def view(where: _Where, *, out: _Out, tokenizer: _Tokenizer = None) -> None:
    """Write one page that opens from disk: sessions, timeline, branches, transcripts, every token.

    The run is neither written nor locked, so it may still go on, and what is missing is said.

    Example: `harness view runs/DIR --out run.html`
    """
    from harness.viewer.look import look_at, look_into, open_tokenizer
    from harness.viewer.run_page import write_page

    seen = look_at(where)
    size = write_page(out, seen, partial(look_into, where), open_tokenizer(seen, tokenizer))
    output.print_text(f"{out}: {len(seen.sessions)} sessions, {size:,} bytes")

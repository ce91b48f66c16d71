"""`harness model`: weights, fetched by name."""

from typing import Annotated

import typer

from harness.cli import options, output

app = typer.Typer(help="Fetch model weights.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keep `get` a subcommand although it is the only one."""


@app.command("get")
def get(
    name: Annotated[str, typer.Argument(help="A name of the catalogue.", show_default=False)],
    as_json: options.Json = False,
) -> None:
    """Fetch a model into the cache, unless it is there, and print its folder."""
    from harness.cli.download import open_download_progress
    from harness.lab.models import get_model

    with open_download_progress(name) as progress:
        folder = get_model(name, progress=progress)
    output.print_result({"model": name, "directory": str(folder)}, str(folder), as_json=as_json)

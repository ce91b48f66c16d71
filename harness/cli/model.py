"""`harness model`: weights, listed and fetched by name."""

from typing import Annotated

import typer

from harness.cli import options, output

app = typer.Typer(help="List and fetch model weights.", no_args_is_help=True)


@app.command("list")
def list_models(as_json: options.Json = False) -> None:
    """List the models of the catalogue, and those that are in the cache."""
    from harness.lab.models import CATALOGUE
    from harness.machine.cache import cache_directory

    listed = []
    for name, found in CATALOGUE.items():
        cached = cache_directory() / "models" / name
        folder = str(cached) if cached.is_dir() else None
        listed.append({"model": name, "directory": folder, "license": found.license, "summary": found.summary})
    lines = [f"{each['model']}  {'cached' if each['directory'] else '      '}  {each['summary']}" for each in listed]
    output.print_result({"models": listed}, "\n".join(lines), as_json=as_json)


@app.command("get")
def get(name: Annotated[str, typer.Argument(help="Name in the catalogue.")], as_json: options.Json = False) -> None:
    """Fetch a model into the cache, unless it is there, and print its folder."""
    from harness.cli.download import open_download_progress
    from harness.lab.models import get_model

    with open_download_progress(name) as progress:
        folder = get_model(name, progress=progress)
    output.print_result({"model": name, "directory": str(folder)}, str(folder), as_json=as_json)

"""`harness sandboxes`: remove what killed managers left."""

import asyncio
from dataclasses import asdict

import typer

from harness.cli import options, output
from harness.suite.exits import ExitCode

app = typer.Typer(no_args_is_help=True, help="Remove sandboxes of agents from this machine.")


@app.callback()
def _group() -> None:
    """Keep `prune` a subcommand, although it is the only one."""


@app.command("prune")
def prune(*, as_json: options.Json = False) -> None:
    """Remove the containers, cgroups and folders of sandboxes whose harness was killed.

    Sandboxes of a running harness stay, also on another machine or container. The exit code is 6 if something
    could not be removed.
    """
    from harness.rollouts.sandboxes.boxed import remove_left

    found = asdict(asyncio.run(remove_left()))
    names = {"containers": "container", "cgroups": "cgroup", "folders": "folder", "failures": "failed"}
    lines = [f"{names[kind]:9}  {each}" for kind, items in found.items() for each in items]
    output.print_result(found, "\n".join(lines or ["no sandboxes are left behind"]), as_json=as_json)
    if found["failures"]:
        raise typer.Exit(ExitCode.INFRASTRUCTURE)

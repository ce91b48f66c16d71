"""`harness agent`: bundled agents, their environments, and whether they work here."""

import asyncio
from typing import Annotated, Any

import typer

from harness.cli import options, output
from harness.cli.installation.doctor import examine_agent

app = typer.Typer(help="List, install and examine agents.", no_args_is_help=True)

_Name = Annotated[str, typer.Argument(help="See `harness agent list`.")]


@app.command("list")
def list_agents(*, as_json: options.Json = False) -> None:
    """List the bundled agents: version, dialect, and whether they are installed.

    Example: `harness agent list`
    """
    from harness.rollouts.agents.install import is_installed
    from harness.rollouts.agents.profile import PROFILE_FILE, load_profile
    from harness.rollouts.agents.programs import bundled_agent, bundled_agents

    rows: list[dict[str, Any]] = []
    for name in bundled_agents():
        path = bundled_agent(name)
        if path.name != PROFILE_FILE:
            rows.append({"name": name, "version": None, "dialect": None, "installed": None, "description": "a script"})
            continue
        profile = load_profile(path.parent)
        row: dict[str, Any] = {"name": name, "version": profile.version, "dialect": profile.spec.dialect}
        rows.append(row | {"installed": is_installed(profile), "description": profile.spec.description})
    lines = []
    for row in rows:
        installed = {True: "installed", False: "-", None: "when it is played"}[row["installed"]]
        cells = (row["name"], row["version"] or "", row["dialect"] or "", installed, row["description"])
        lines.append("  ".join(f"{cell:<{width}}" for cell, width in zip(cells, (14, 9, 18, 17, 0), strict=True)))
    output.print_result({"agents": rows}, "\n".join(lines), as_json=as_json)


@app.command("install")
def install(name: _Name, *, as_json: options.Json = False) -> None:
    """Install an agent into the cache, pinned by its lock file; does nothing if it is installed.

    Example: `harness agent install openai_agents`
    """
    from harness.rollouts.agents.install import install_agent
    from harness.rollouts.agents.programs import bundled_profile

    profile = bundled_profile(name)
    folder = asyncio.run(install_agent(profile, output.say))
    document = {"name": profile.name, "version": profile.version, "environment": str(folder)}
    output.print_result(document, str(folder), as_json=as_json)


@app.command("doctor")
def doctor(name: _Name, *, as_json: options.Json = False) -> int:
    """Check whether an agent can run here: installed, at the pinned version, in a served dialect.

    Exit codes: 0 it can, 6 it cannot.

    Example: `harness agent doctor openai_agents`
    """
    return examine_agent(name, as_json=as_json)

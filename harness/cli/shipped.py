"""`harness scenario`, `agent` and `model`: what the harness brings along, listed, checked and fetched by name."""

import asyncio
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from harness.cli import options, output
from harness.cli.installation.doctor import examine_agent

if TYPE_CHECKING:
    from harness.suite.scenarios.folder import ScenarioFolder

scenario_app = typer.Typer(help="List, check and describe scenarios.", no_args_is_help=True)


@scenario_app.command("list")
def list_scenarios(
    where: Annotated[str | None, typer.Argument(metavar="[DIR]", help="A suite.  [default: the bundled ones]")] = None,
    as_json: options.Json = False,
) -> None:
    """List scenarios."""
    from harness.suite.scenarios.folder import bundled_scenarios, find_scenarios

    folders = find_scenarios(where) if where else bundled_scenarios()
    summaries = [_summary(folder) for folder in folders]
    width = max((len(each["name"]) for each in summaries), default=0)
    lines = (f"{each['name']:{width}}  {each['sessions']:3} sessions  {each['description']}" for each in summaries)
    output.print_result({"scenarios": summaries}, "\n".join(lines), as_json=as_json)


@scenario_app.command("check")
def check(where: Annotated[str, typer.Argument(metavar="SUITE_OR_DIR")], as_json: options.Json = False) -> None:
    """Check the files of scenarios without running anything. Exit code 4 if one is wrong."""
    from harness.suite.scenarios.folder import find_scenarios

    summaries = [_summary(folder) for folder in find_scenarios(where)]
    lines = (f"{each['name']}: ok ({each['sessions']} sessions)" for each in summaries)
    output.print_result({"scenarios": summaries}, "\n".join(lines), as_json=as_json)


@scenario_app.command("schema")
def schema(
    file: Annotated[
        Literal["scenario", "script", "profile"],
        typer.Argument(metavar="[FILE]", help="`scenario`, `script` or `profile`."),
    ] = "scenario",
    as_json: options.Json = False,
) -> None:
    """Print the JSON schema of scenario.toml, of a script or of an agent's profile.

    An editor checks a TOML file whose first line is `#:schema PATH`.
    """
    from harness.suite.scenarios.schemas import schema_of

    del as_json  # the schema is JSON anyway
    output.print_json(schema_of(file))


def _summary(folder: "ScenarioFolder") -> dict[str, Any]:
    scenario = folder.scenario
    return {
        "name": scenario.name,
        "description": scenario.description,
        "directory": str(folder.directory),
        "agent": scenario.agent.name,
        "sessions": folder.session_count,
    }


agent_app = typer.Typer(help="List, install and examine agents.", no_args_is_help=True)

_Name = Annotated[str, typer.Argument(help="See `harness agent list`.")]


@agent_app.command("list")
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


@agent_app.command("install")
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


@agent_app.command("doctor")
def doctor(name: _Name, *, as_json: options.Json = False) -> int:
    """Check whether an agent can run here: installed, at the pinned version, in a served dialect.

    Exit codes: 0 it can, 6 it cannot.

    Example: `harness agent doctor openai_agents`
    """
    return examine_agent(name, as_json=as_json)


model_app = typer.Typer(help="List and fetch model weights.", no_args_is_help=True)


@model_app.command("list")
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


@model_app.command("get")
def get(name: Annotated[str, typer.Argument(help="Name in the catalogue.")], as_json: options.Json = False) -> None:
    """Fetch a model into the cache, unless it is there, and print its folder."""
    from harness.cli.download import open_download_progress
    from harness.lab.models import get_model

    with open_download_progress(name) as progress:
        folder = get_model(name, progress=progress)
    output.print_result({"model": name, "directory": str(folder)}, str(folder), as_json=as_json)

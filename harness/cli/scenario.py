"""`harness scenario`: lists scenarios, checks their files, prints the schemas of their files."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from harness.cli import options, output

if TYPE_CHECKING:
    from harness.suite.scenarios.folder import ScenarioFolder


app = typer.Typer(help="List, check and describe scenarios.", no_args_is_help=True)


@app.command("list")
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


@app.command("check")
def check(where: Annotated[str, typer.Argument(metavar="SUITE_OR_DIR")], as_json: options.Json = False) -> None:
    """Check the files of scenarios without running anything. Exit code 4 if one is wrong."""
    from harness.suite.scenarios.folder import find_scenarios

    summaries = [_summary(folder) for folder in find_scenarios(where)]
    lines = (f"{each['name']}: ok ({each['sessions']} sessions)" for each in summaries)
    output.print_result({"scenarios": summaries}, "\n".join(lines), as_json=as_json)


@app.command("schema")
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

"""`harness config`: the file of one's own defaults, and where each value comes from."""

from pathlib import Path
from typing import Any, NamedTuple

import typer

from harness.cli import options, output

app = typer.Typer(help="The file of one's own defaults of options.", no_args_is_help=True)


class _InForce(NamedTuple):
    """A value that the file or the environment gives to an option of a command."""

    command: str
    option: str
    value: Any
    source: str
    """`file`, or `environment`."""
    key: str
    """Of the file, or the name of the variable."""


@app.command("path")
def path(*, as_json: options.Json = False) -> None:
    """Print where the file is, whether there is one or not. HARNESS_CONFIG names another.

    Example: `harness config path`
    """
    from harness.cli.installation.config_file import config_path

    where = config_path()
    if as_json:
        output.print_json({"path": str(where), "exists": where.is_file()})
    else:
        output.print_text(str(where))


@app.command("show")
def show(context: typer.Context, *, as_json: options.Json = False) -> None:
    """Show each option that the file or the environment sets, and which of them does; flags go before both.

    Tokens and passwords are not shown. Exit code 4 when the file is wrong.

    Example: `harness config show`
    """
    import json

    from harness.cli.installation.config_file import config_path, find_danger, read_tables, settings_of
    from harness.telemetry.printable import printable

    where = config_path()
    tables = read_tables(where)
    root = context.find_root().command
    found = _in_force(root, settings_of(where, tables, root))
    if danger := find_danger(where, tables):
        output.say(f"harness: {danger}")
    if as_json:
        document = {"path": str(where), "exists": where.is_file(), "settings": [each._asdict() for each in found]}
        output.print_json(document)
        return
    output.print_text(f"{where}{'' if where.is_file() else ', which is not there'}")
    by_value: dict[tuple[str, str, str], list[str]] = {}
    for each in found:
        source = f"{where.name}: {each.key}" if each.source == "file" else each.key
        by_value.setdefault((each.option, json.dumps(each.value, ensure_ascii=False), source), []).append(each.command)
    for (option, value, source), commands in by_value.items():
        output.print_text(f"{option} = {printable(value)}  ({source})  {', '.join(commands)}")


def _in_force(root: Any, settings: Any) -> list[_InForce]:
    """What typer itself finds for each option when no flag is given."""
    from harness.cli.installation.config_file import each_command, options_of

    found = []
    for words, command in each_command(root):
        of_file = settings[words]
        defaults = {name: setting.value for name, setting in of_file.items()}
        context = command.make_context(words[-1], [], default_map=defaults, resilient_parsing=True)
        for key, option in options_of(command).items():
            value = _shown(key, context.params.get(option.name))
            match context.get_parameter_source(option.name).name:
                case "ENVIRONMENT":
                    found.append(_InForce(" ".join(words), key, value, "environment", str(option.envvar)))
                case "DEFAULT_MAP":
                    found.append(_InForce(" ".join(words), key, value, "file", of_file[option.name].key))
    return found


def _shown(key: str, value: Any) -> Any:
    """`value` as JSON, without what is secret of it."""
    from harness.cli.installation.config_file import SECRETS
    from harness.credentials import hide_secrets

    match value:
        case None | bool() | int() | float():
            return value
        case list() | tuple():
            return [_shown(key, each) for each in value]
        case str() | Path():
            return "..." if key in SECRETS else " ".join(hide_secrets(str(value).split(" ")))
    return str(value)

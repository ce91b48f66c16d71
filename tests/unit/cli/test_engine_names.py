"""The command line names every kind of engine that there is.

Help is printed before anything heavy is imported, so its texts do not read the table of engine kinds: these tests do.
"""

from typing import Any

import pytest
import typer

from harness.cli.main import app
from harness.engines.kinds import ENGINE_KINDS, server_kinds
from harness.lab.lanes import LaneEngine

HERE = [name for name, kind in ENGINE_KINDS.items() if kind.server is None]
SERVERS = list(server_kinds())


def help_of(*path: str, parameter: str) -> str:
    """The help text of one parameter of a subcommand."""
    command: Any = typer.main.get_command(app)
    for name in path:
        command = command.commands[name]
    [text] = [each.help for each in command.params if each.name == parameter]
    return str(text)


@pytest.mark.parametrize(
    ("path", "parameter", "expected"),
    [
        (("run",), "engine", [*HERE, *SERVERS]),
        (("serve",), "engine", HERE),
        (("verify", "engine"), "a", [*HERE, *(f"{name}=URL" for name in SERVERS)]),
        (("engine", "up"), "engine", list(LaneEngine)),
    ],
)
def test_help_names_every_engine(path: tuple[str, ...], parameter: str, expected: list[str]):
    """A further row of the table must be told to the user where engines are chosen."""
    text = help_of(*path, parameter=parameter)

    assert [name for name in expected if f"`{name}`" not in text] == []

"""The page of all commands and options, from what `--help` is made of."""

import re
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from harness.cli.log_options import LOG_OPTIONS
from harness.cli.main import app

INTRODUCTION = """# Commands

Every command with its arguments and options; `harness COMMAND --help` says the same. This page is written by
`make reference`. Configuration files, completion and what all commands share, such as `-v`, `-q` and `--log-level`:
[the command line](command-line.md#logs).
"""


def commands_page() -> str:
    """The whole page: the commands in the order of `harness --help`, and the variables that stand for options."""
    found = [*_commands(get_command(app), "harness")]
    parts = [INTRODUCTION, *(_section(name, command) for name, command in found), _variables(found)]
    return "\n".join(parts)


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Those that are no group, with their names; hidden ones are not told of."""
    for word, below in getattr(command, "commands", {}).items():
        if not below.hidden:
            yield from _commands(below, f"{name} {word}")
    if not hasattr(command, "commands"):
        yield name, command


def _own(command: Any) -> list[Any]:
    """Its arguments and options, less hidden ones and those that all commands have."""
    return [each for each in command.params if not each.hidden and each.name not in LOG_OPTIONS]


def _section(name: str, command: Any) -> str:
    arguments = [each for each in command.params if each.param_type_name == "argument" and not each.hidden]
    usage = " ".join([name, *(_argument(each) for each in arguments), "[OPTIONS]"])
    lines = [f"## {name}", "", "```text", usage, "```", "", _prose(command.help), ""]
    rows = [_row(each) for each in _own(command)]
    if rows:
        lines += ["| | variable | default | |", "| --- | --- | --- | --- |", *rows, ""]
    return "\n".join(lines)


def _argument(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    shown = name if argument.required or name.startswith("[") else f"[{name}]"
    return f"{shown}..." if argument.nargs == -1 and not shown.endswith("...") else shown


def _row(option: Any) -> str:
    if option.param_type_name == "argument":
        name = f"`{(option.metavar or option.name.upper()).strip('[]')}`"
    else:
        flags = ", ".join(f"`{flag}`" for flag in [*option.opts, *option.secondary_opts])
        name = f"{flags} `{option.metavar}`" if option.metavar else flags
    variable = f"`{option.envvar}`" if option.envvar else ""
    text = _cell(option.help or "") + (" May be repeated." if option.multiple else "")
    return f"| {name} | {variable} | {_default(option)} | {text.strip()} |"


def _default(option: Any) -> str:
    if option.required:
        return "required"
    if not option.show_default or option.default in (None, False, (), []) or callable(option.default):
        return ""
    return f"`{_cell(str(getattr(option.default, 'value', option.default)))}`"


def _variables(found: list[tuple[str, Any]]) -> str:
    """The table of variables: which options each one stands for, in which commands; that of all is in prose."""
    stands_for: dict[str, dict[str, list[str]]] = {}
    for name, command in found:
        for option in _own(command):
            if option.envvar:
                options = stands_for.setdefault(option.envvar, {})
                options.setdefault(option.opts[0], []).append(name.removeprefix("harness "))
    rows = [
        f"| `{variable}` | {'; '.join(f'`{flag}` of {_listed(names)}' for flag, names in options.items())} |"
        for variable, options in sorted(stands_for.items())
    ]
    return "\n".join(["## Variables", "", "| variable | stands for |", "| --- | --- |", *rows]) + "\n"


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _prose(text: str) -> str:
    return "\n".join(line.strip() for line in (text or "").strip().splitlines())


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;").strip()

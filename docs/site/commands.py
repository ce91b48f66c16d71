"""The page of all commands and options: a part written by hand, and what `--help` is made of."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from pages import ROOT
from typer.main import get_command

from harness.cli.log_options import LOG_OPTIONS
from harness.cli.main import app

PAGE = ROOT / "docs/cli.md"
MARK = "<!-- From here on this page is written by `make reference`. -->"

SHARED = """Options that several commands have in the same words; each command below names the ones it has. The variable
after an option stands for it; a flag takes precedence."""


def commands_page() -> str:
    """Return the whole page: the part written by hand, shared options, then the commands as `harness --help` has them."""
    found = [*_commands(get_command(app), "harness")]
    by_hand = PAGE.read_text(encoding="utf-8").partition(MARK)[0] + MARK + "\n"
    counts = Counter(_row(option) for _, command in found for option in _own(command))
    shared = {row for row, count in counts.items() if count > 1 and row.startswith("- `-")}
    parts = [by_hand, _shared(sorted(shared)), *(_section(name, command, shared) for name, command in found)]
    return "\n".join(parts)


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the commands that are no group, with their names; leave out hidden ones."""
    for word, below in getattr(command, "commands", {}).items():
        if not below.hidden:
            yield from _commands(below, f"{name} {word}")
    if not hasattr(command, "commands"):
        yield name, command


def _own(command: Any) -> list[Any]:
    """Return its arguments and options, less hidden ones and those that all commands have."""
    return [each for each in command.params if not each.hidden and each.name not in LOG_OPTIONS]


def _shared(rows: list[str]) -> str:
    return "\n".join(["## Shared options", "", SHARED, "", *rows, ""])


def _section(name: str, command: Any, shared: set[str]) -> str:
    arguments = [each for each in command.params if each.param_type_name == "argument" and not each.hidden]
    usage = " ".join([name, *(_argument(each) for each in arguments)])
    lines = [f"### {name}", "", *([f"`{usage}`", ""] if arguments else []), _prose(command.help), ""]
    options = {_row(each): each for each in _own(command)}
    rows = [row for row in options if row not in shared]
    if rows:
        lines += [*rows, ""]
    if named := [f"`{option.opts[0]}`" for row, option in options.items() if row in shared]:
        lines += [f"Shared: {', '.join(named)}", ""]
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
    if option.envvar:
        name += f" `{option.envvar}`"
    text = _text(option.help or "")
    if option.multiple and "may be repeated" not in text:
        text += " May be repeated."
    default = _default(option)
    return f"- {name}" + (f", {default}" if default else "") + (f": {text.strip()}" if text else "")


def _default(option: Any) -> str:
    if option.required:
        return "required"
    if not option.show_default or option.default in (None, False, (), []) or callable(option.default):
        return ""
    return f"default `{getattr(option.default, 'value', option.default)}`"


def _prose(text: str) -> str:
    return "\n".join(line.strip() for line in (text or "").strip().splitlines())


def _text(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("<", "&lt;").strip()

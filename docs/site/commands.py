"""The page of all commands and options: a part written by hand, and what `--help` is made of."""

import re
from collections.abc import Iterator
from typing import Any

from pages import ROOT
from typer.main import get_command

from harness.cli.main import LOG_OPTIONS, app

PAGE = ROOT / "docs/cli.md"
MARK = "<!-- From here on this page is written by `make reference`. -->"

SHARED = "Several commands have these. The variable after an option stands for it; its default is in brackets."
SERVERS = ("serve", "router")


def commands_page() -> str:
    """Return the whole page: the part written by hand, shared options, then the commands in the order of `--help`."""
    found = [*_commands(get_command(app), "harness")]
    by_hand = PAGE.read_text(encoding="utf-8").partition(MARK)[0] + MARK + "\n"
    commands_of: dict[str, list[str]] = {}
    for name, command in found:
        for option in _own(command):
            commands_of.setdefault(_row(option), []).append(name.removeprefix("harness "))
    shared = {row: names for row, names in sorted(commands_of.items()) if len(names) > 1}
    everywhere = [name.removeprefix("harness ") for name, _ in found]
    parts = [by_hand, _shared(shared, everywhere), *(_section(name, command, shared) for name, command in found)]
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


def _shared(shared: dict[str, list[str]], everywhere: list[str]) -> str:
    of_servers = [row for row, names in shared.items() if tuple(names) == SERVERS]
    others = [f"{row} *{_named(names, everywhere)}*" for row, names in shared.items() if row not in of_servers]
    headings = ("## Shared options", "### Of harness serve and harness router")
    return "\n".join([headings[0], "", SHARED, "", *others, "", headings[1], "", *of_servers, ""])


def _named(names: list[str], everywhere: list[str]) -> str:
    """Return the names of the commands, or of those without the option if they are fewer; a whole group by its own."""
    without = [name for name in everywhere if name not in names]
    if len(without) < len(names):
        return f"all but {', '.join(without)}"
    groups = {name.partition(" ")[0] for name in everywhere if " " in name}
    whole = {group for group in groups if not any(name.startswith(f"{group} ") for name in without)}
    return ", ".join(dict.fromkeys(first if (first := name.partition(" ")[0]) in whole else name for name in names))


def _section(name: str, command: Any, shared: dict[str, list[str]]) -> str:
    arguments = [each for each in command.params if each.param_type_name == "argument" and not each.hidden]
    usage = " ".join([name, *(_argument(each) for each in arguments)])
    lines = [f"### {name}", "", *([f"`{usage}`", ""] if arguments else []), _prose(command.help), ""]
    rows = [row for row in map(_row, _own(command)) if row not in shared]
    if rows:
        lines += [*rows, ""]
    return "\n".join(lines)


def _argument(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    shown = name if argument.required or name.startswith("[") else f"[{name}]"
    return f"{shown}..." if argument.nargs == -1 and not shown.endswith("...") else shown


def _row(option: Any) -> str:
    if option.param_type_name == "argument":
        name = f"`{(option.metavar or option.name.upper()).removeprefix('[').removesuffix(']')}`"
    else:
        flags = ", ".join(f"`{flag}`" for flag in [*option.opts, *option.secondary_opts])
        name = f"{flags} `{option.metavar}`" if option.metavar else flags
    if option.envvar:
        name += f" `{option.envvar}`"
    text = _text(option.help or "")
    if option.multiple and "may be repeated" not in text:
        text += " May be repeated."
    default = _default(option)
    return f"- {name}" + (f" {default}" if default else "") + (f": {text.strip()}" if text else "")


def _default(option: Any) -> str:
    if option.required and option.param_type_name == "option":
        return "(required)"
    if not option.show_default or option.default in (None, False, "", (), []) or callable(option.default):
        return ""
    return f"(`{getattr(option.default, 'value', option.default)}`)"


def _prose(text: str) -> str:
    """Return the text of a command without what `--help` has: examples, and exit codes that all runs have."""
    text = "\n".join(line.strip() for line in (text or "").strip().splitlines())
    text = re.sub(r"\n*Exit codes: .*infrastructure\s+failed\.", "", text, flags=re.DOTALL)
    return re.sub(r"\s*\bExamples?: (?:.|\n)*?(?=\n\n|$)", "", text)


def _text(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("<", "&lt;").strip()

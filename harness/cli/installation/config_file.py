"""A user's own defaults of options: a TOML file with a table for each command, and `[default]` for all of them.

A flag goes before the variable of the environment, that before the file, and the file before the default of the option.
`[default]` is what the environment could say: it holds for every option that has a variable. The file is checked as a
whole, because a slip that nobody is told of is a setting that does not hold; no value of it is quoted, as there are
tokens among them.
"""

import os
import stat
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import typer

from harness.cli import output
from harness.errors import ConfigError

VARIABLE = "HARNESS_CONFIG"
SECRETS = frozenset({"admin_token", "engine_key"})
_EVERY = "default"
_OF_ONE_CALL = frozenset({"json"})
"""Options that go with whoever reads the answer."""
_KINDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (bool, "true or false"),
    (int, "an integer"),
    (float, "a number"),
    ((str, Path), "a string"),
    ((list, tuple), "an array"),
    (dict, "a table"),
)

Command = Any
"""A command or a group as typer builds it; typer does not export its types."""

Tables = Mapping[str, Any]
"""What a file says."""


class Setting(NamedTuple):
    """The value that a file has for an option of a command."""

    key: str
    """With its table: `serve.port`."""
    value: Any


Settings = Mapping[tuple[str, ...], Mapping[str, Setting]]
"""By the words of a command (`("ctl", "status")`), by the parameter of an option."""


def use_config_file(context: typer.Context) -> None:
    """Have the commands below `context`, which is that of the program, take their defaults from the file.

    Raises `ConfigError`.
    """
    path = config_path()
    tables = read_tables(path)
    if danger := find_danger(path, tables):
        output.say(f"harness: {danger}")
    if tables:
        context.default_map = _as_default_map(settings_of(path, tables, context.command))


def config_path() -> Path:
    """Where the file is: `$HARNESS_CONFIG`, else `harness/config.toml` in the user's configuration directory."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    base = os.environ.get("XDG_CONFIG_HOME", "")
    if not base.startswith("/"):  # the standard has such a one ignored
        base = os.path.expanduser("~/.config")  # noqa: PTH111  # that of `Path` raises where there is no home
    return Path(base) / "harness" / "config.toml"


def read_tables(path: Path) -> Tables:
    """What the file says; nothing where there is none, unless it was named. Raises `ConfigError`."""
    try:
        return tomllib.loads(path.read_bytes().decode())
    except (FileNotFoundError, NotADirectoryError) as error:
        if os.environ.get(VARIABLE):
            raise ConfigError(f"{path}: {VARIABLE} names it, and there is no such file") from error
        return {}
    except OSError as error:
        raise ConfigError(f"{path}: it cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # broken off, or not UTF-8
        raise ConfigError(f"{path}: expected TOML: {error}") from error


def find_danger(path: Path, tables: Tables) -> str | None:
    """The danger of the file's mode, with its cure; None when others neither decide what runs nor read a token."""
    if not path.is_file():
        return None
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & stat.S_IWOTH:
        return f"{path}: everybody may write it, and it says what is run: chmod 600 {path}"
    if mode & (stat.S_IRWXG | stat.S_IRWXO) and _holds_secret(tables):
        return f"{path}: others may read or write it, and there is a token in it: chmod 600 {path}"
    return None


def _holds_secret(table: Tables) -> bool:
    return any(key in SECRETS or (isinstance(value, dict) and _holds_secret(value)) for key, value in table.items())


def settings_of(path: Path, tables: Tables, root: Command) -> Settings:
    """What `tables`, read from `path`, say for each command below `root`. Raises `ConfigError`."""
    commands = dict(each_command(root))
    of_every = {key for each in commands.values() for key, option in options_of(each).items() if option.envvar}
    _require_known(path, "", tables, {_EVERY, *root.commands}, ())
    for name, table in tables.items():
        if name == _EVERY:
            _require_known(path, name, table, (), of_every)
        else:
            _check_table(path, name, table, root.commands[name])
    return {words: _settings_of_command(path, tables, words, command) for words, command in commands.items()}


def _check_table(path: Path, where: str, table: Any, command: Command) -> None:
    below = getattr(command, "commands", {})
    _require_known(path, where, table, below, {key for _, each in each_command(command) for key in options_of(each)})
    for name, value in table.items():
        if name in below and isinstance(value, dict):
            _check_table(path, f"{where}.{name}", value, below[name])


def _require_known(path: Path, where: str, table: Any, below: Collection[str], keys: Collection[str]) -> None:
    """Raise `ConfigError` unless `table` is one, and names in it tables of commands, or `keys`."""
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: {where}: expected a table, got {_kind(table)}")
    for name, value in table.items():
        full = f"{where}.{name}" if where else name
        if name not in keys and name in below and not isinstance(value, dict):
            raise ConfigError(f"{path}: {full}: expected a table, got {_kind(value)}")
        if name not in keys and name not in below:
            from harness.rollouts.agents.profile import closest

            expected = {"": "a command or `default`", _EVERY: "an option that has a variable"}
            of_command = f"an option of `harness {where.replace('.', ' ')}`"
            raise ConfigError(
                f"{path}: {full!r}: expected {expected.get(where, of_command)}, got {name!r};"
                f" {closest(name, sorted({*keys, *below}))}"
            )


def _settings_of_command(path: Path, tables: Tables, words: tuple[str, ...], command: Command) -> dict[str, Setting]:
    """The narrowest table counts: that of the command, then of its group, then `[default]`."""
    settings = {}
    table: Any = tables
    places = [(_EVERY, tables.get(_EVERY, {}))]
    for number, word in enumerate(words, 1):
        table = table.get(word, {})
        places.append((".".join(words[:number]), table))
    for where, each in places:
        for key, option in options_of(command).items():
            if key in each and key not in getattr(command, "commands", {}) and (where != _EVERY or option.envvar):
                full = f"{where}.{key}"
                settings[option.name] = Setting(full, _checked(path, full, each[key], option, command))
    return settings


def _checked(path: Path, key: str, value: Any, option: Any, command: Command) -> Any:
    """`value` as the option takes it. Raises `ConfigError`."""
    if isinstance(value, str) and value.startswith("~/"):  # there is no shell that would
        value = os.path.expanduser(value)  # noqa: PTH111
    if option.multiple and not isinstance(value, list):
        raise ConfigError(f"{path}: {key}: expected an array, got {_kind(value)}")
    try:
        taken = option.process_value(typer.Context(command), value)
    except typer.BadParameter as error:
        raise ConfigError(f"{path}: {key}: {error.message.rstrip('.')}; it is {_kind(value)}") from error
    pairs = zip(taken, value, strict=True) if option.multiple else [(taken, value)]
    for expected, got in ((_kind(one), _kind(other)) for one, other in pairs):
        if got != expected and (got, expected) != ("an integer", "a number"):
            raise ConfigError(f"{path}: {key}: expected {expected}, got {got}")
    return value


def _kind(value: Any) -> str:
    return next((words for kind, words in _KINDS if isinstance(value, kind)), "a date or a time")


def _as_default_map(settings: Settings) -> dict[str, Any]:
    """`settings` as typer's `Context.default_map` takes them: by group, by command, by parameter."""
    found: dict[str, Any] = {}
    for words, values in settings.items():
        place = found
        for word in words:
            place = place.setdefault(word, {})
        place.update({name: setting.value for name, setting in values.items()})
    return found


def each_command(command: Command, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Command]]:
    """`command`, or each one below it where it is a group, with the words by which it is called from there."""
    if not hasattr(command, "commands"):
        yield words, command
        return
    for name, each in command.commands.items():
        yield from each_command(each, (*words, name))


def options_of(command: Command) -> dict[str, Any]:
    """The options of `command` that a file may set, by the key for it: the flag, with underscores."""
    options = {}
    for each in command.params:
        if each.param_type_name == "option" and not each.hidden and not each.is_eager:
            flag = next((flag for flag in each.opts if flag.startswith("--")), each.name)
            options[flag.lstrip("-").replace("-", "_")] = each
    return {key: option for key, option in options.items() if key not in _OF_ONE_CALL}

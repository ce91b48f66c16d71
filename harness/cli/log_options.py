"""`-v`, `-q` and `--log-level` of every command: how much of the log goes to standard error.

The level is chosen here, before a command runs. Results and progress messages are not part of the log.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal

import typer

_PANEL = "Log, on standard error"
_SERVERS = frozenset({"serve", "router"})
"""Commands that log from `info` on, since they report on other programs' work."""
_QUIETER = {"info": "error", "error": "critical"}

Level = Literal["debug", "info", "warning", "error", "critical"]

_Verbose = Annotated[
    int,
    typer.Option("--verbose", "-v", count=True, show_default=False, help="Log more: -v, -vv.", rich_help_panel=_PANEL),
]
_Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Log less.", rich_help_panel=_PANEL)]
_LogLevel = Annotated[
    Level | None,
    typer.Option(
        "--log-level",
        envvar="HARNESS_LOG_LEVEL",
        help="Lowest level to log; -v and -q take precedence.",
        rich_help_panel=_PANEL,
    ),
]


LOG_OPTIONS = frozenset({"verbose", "quiet", "log_level"})


def choose_level(usual: Level, *, verbose: int, quiet: bool, log_level: Level | None) -> str:
    """Return the level of a command whose default is `usual`. Raises `typer.BadParameter`."""
    if verbose and quiet:
        raise typer.BadParameter("expected -v or -q, got both")
    if verbose:
        return "debug" if verbose > 1 or usual == "info" else "info"
    if quiet:
        return _QUIETER[usual]
    return log_level or usual


def add_log_options(app: typer.Typer) -> None:
    for command in app.registered_commands:
        assert command.callback is not None
        command.callback = _takes_log_options(command.callback, "info" if command.name in _SERVERS else "error")
    for group in app.registered_groups:
        assert group.typer_instance is not None
        add_log_options(group.typer_instance)


def _takes_log_options(command: Callable[..., Any], usual: Level) -> Callable[..., Any]:

    @functools.wraps(command)
    def run_command(*, verbose: int, quiet: bool, log_level: Level | None, **options: Any) -> Any:
        from harness.server.telemetry.logging import configure_logging

        configure_logging(choose_level(usual, verbose=verbose, quiet=quiet, log_level=log_level))
        return command(**options)

    own = inspect.signature(command)
    ours = (("verbose", 0, _Verbose), ("quiet", False, _Quiet), ("log_level", None, _LogLevel))
    parameters = [
        *own.parameters.values(),
        *(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, default, annotation in ours
        ),
    ]
    run_command.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]  # which typer reads
    run_command.__annotations__ = {each.name: each.annotation for each in parameters}
    return run_command

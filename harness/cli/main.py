"""The `harness` command: its subcommands, their log options, and how they exit.

Only typer is imported before the command is known, so `--help` answers at once; each subcommand imports what it needs.
Results go to standard output, everything else to standard error. An error is one line with a next step;
`HARNESS_DEBUG=1` shows where it was raised. The log is neither: `-v`, `-q` and `--log-level` choose its level.
"""

import functools
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import typer

from harness._version import __version__
from harness.cli import demo, output, shipped, this_machine, verify
from harness.cli.installation import doctor
from harness.cli.look import reports, show
from harness.cli.operate import ctl, sessions
from harness.cli.runs import exec as exec_
from harness.cli.runs import fork, run, train
from harness.cli.servers import router, serve
from harness.errors import HarnessError
from harness.suite.exits import ExitCode, exit_code_of

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


_COMPLETE = "_HARNESS_COMPLETE"
"""Variable that makes typer answer a shell's completion script, which calls `harness` and so fits later versions."""


def _completion(shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument()]) -> None:
    """Print the completion script of a shell, for its startup file.

    Examples: `eval "$(harness completion bash)"`, `eval "$(harness completion zsh)"`, `harness completion fish |
    source`
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]  # which it has always had

    output.print_text(get_completion_script(prog_name="harness", complete_var=_COMPLETE, shell=shell))


app = typer.Typer(
    name="harness",
    help="Run real agents against a model and keep every token they saw and sampled.",
    no_args_is_help=True,
    add_completion=_COMPLETE in os.environ,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_PANELS: Mapping[str, Mapping[str, Callable[..., object] | typer.Typer]] = {
    "Begin": {"demo": demo.demo, "init": demo.init, "doctor": doctor.doctor, "completion": _completion},
    "Run": {"run": run.run, "resume": fork.resume, "train": train.train, "exec": exec_.execute, "env": exec_.env},
    "Look": {
        "show": show.show,
        "open": show.open_last,
        "view": show.view,
        "report": reports.report,
        "diff": reports.diff,
        "replay": fork.replay,
        "audit": reports.audit,
        "fork": fork.fork,
        "values": fork.values,
    },
    "Serve": {"serve": serve.serve, "router": router.router, "ctl": ctl.app, "sessions": sessions.app},
    "Prepare and check": {
        "scenario": shipped.scenario_app,
        "agent": shipped.agent_app,
        "model": shipped.model_app,
        "engine": this_machine.engine_app,
        "sandboxes": this_machine.sandboxes_app,
        "verify": verify.app,
    },
}
"""Commands and groups of commands, in the order of `--help`."""

for panel, commands in _PANELS.items():
    for command, runs in commands.items():
        if isinstance(runs, typer.Typer):
            app.add_typer(runs, name=command, rich_help_panel=panel)
        else:
            app.command(command, rich_help_panel=panel)(runs)
add_log_options(app)

_INTERRUPTED = 130
"""Typer's exit code after Ctrl+C in a command without its own handling."""

_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""Base of all usage errors; typer does not export it."""


def _print_version(asked: bool) -> None:
    if asked:
        print(f"harness {__version__}")  # noqa: T201  # the result of --version
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    del version


def main() -> None:
    """Run the command line and exit with an `ExitCode`."""
    try:
        code = app(prog_name="harness", standalone_mode=False)
        if code == _INTERRUPTED:
            raise KeyboardInterrupt
    except _UsageError as error:
        said = error.format_message().rstrip(".")  # type: ignore[attr-defined]  # of the usage error
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "harness"
        # A command without arguments prints its help, and its message is empty.
        _fail(f"{said}; see `{command} --help`" if said else "", "usage", ExitCode.USAGE)
    except HarnessError as error:
        _fail(error.message, error.code, exit_code_of(error))
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", "interrupted", ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output is gone; keep the interpreter from complaining about it while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ExitCode.PASSED)
    except Exception as error:  # noqa: BLE001  # the last resort of the process
        _fail(f"internal error: {type(error).__name__}: {error}", "internal_error", ExitCode.INTERNAL)
    else:
        _leave(code if isinstance(code, int) else ExitCode.PASSED)


def _fail(message: str, code: str, exit_code: ExitCode) -> None:
    if os.environ.get("HARNESS_DEBUG"):
        traceback.print_exc()
    elif exit_code is ExitCode.INTERNAL:
        message = f"{message}; set HARNESS_DEBUG=1 for a traceback"
    if message and "--shard" not in sys.argv:  # the front prints a shard's error, in the same words
        output.say(f"harness: {message}")
    if "--json" in sys.argv:
        output.print_json({"error": {"message": message, "code": code}, "exit_code": int(exit_code)})
    _leave(exit_code)


def _leave(code: int) -> None:
    # The process aborts if a thread is in native code when the interpreter shuts down.
    if any(thread.daemon for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)

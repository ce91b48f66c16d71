"""`harness run`: a suite, with two stages of Ctrl+C and a command to resume."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli import options, output
from harness.errors import RunError, ScenarioError

if TYPE_CHECKING:
    from harness.suite.record.config import Overrides
    from harness.suite.run.open_run import FailedOnly, OpenedRun
    from harness.suite.run.report import RunReport

_Suite = Annotated[
    str | None,
    typer.Argument(
        metavar="SUITE_OR_DIR",
        help="A bundled scenario, a folder with a scenario.toml or of such folders; with --resume, a run directory.",
    ),
]
_Harbor = Annotated[
    str | None, typer.Option(metavar="DIR", help="Harbor task, or folder of tasks, instead of a suite.")
]
_Agent = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Agent in place of the scenario's: bundled, script, profile or command;"
        " for Harbor tasks also `oracle`, `nop`.",
    ),
]
_Concurrency = Annotated[int | None, options.option("HARNESS_CONCURRENCY", "Sessions run concurrently.", "-n", min=1)]
_Engine = Annotated[
    str | None,
    options.option(
        "HARNESS_ENGINE",
        "`local`, `scripted`; `sglang`, `vllm`, started for the run; NAME=URL[,URL] of running servers."
        "  [default: the scenario's]",
        callback=options.yields_to("server", "worker"),
    ),
]
_Server = Annotated[
    str | None,
    options.option(
        "HARNESS_SERVER",
        "Running session server or router, instead of an engine.",
        callback=options.yields_to("engine", "worker", "model", "template", "otlp"),
        metavar="URL",
    ),
]
_Workers = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=URL",
        help="`sglang=URL`, `vllm=URL`: a running engine server, behind a router of the run, in place of"
        " the scenario's engine or its lanes of that kind; may be repeated.",
    ),
]
_Model = Annotated[
    str | None,
    options.option("HARNESS_MODEL", "Catalogue name, folder or hub id.", callback=options.yields_to("server")),
]
_Seed = Annotated[int | None, typer.Option(min=0, envvar="HARNESS_SEED")]
_Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A key of scenario.toml with another value, both as TOML: limits.turns=3; may be repeated.",
    ),
]
_Filter = Annotated[
    list[str] | None,
    typer.Option(
        "--filter",
        metavar="COLUMN=VALUE",
        help="Only prompts whose row matches; also != < <= > >= and ~ (regular expression); may be repeated.",
    ),
]
_Limit = Annotated[int | None, typer.Option(min=1, help="Only the first N prompts of each scenario.")]
_Shuffle = Annotated[int | None, typer.Option(min=0, metavar="SEED", help="Prompts in random order.")]
_Epochs = Annotated[int | None, typer.Option(min=1, help="Passes over the prompts.")]
_Out = Annotated[Path | None, options.option("HARNESS_OUT", "Run directory.  [default: runs/<suite>-<time>]")]
_Resume = Annotated[
    bool, typer.Option("--resume", help="Continue an interrupted run; finished sessions are not rerun.")
]
_Only = Annotated[
    str | None,
    typer.Option(
        metavar="failed[:CAUSE,...]",
        help="With --resume: rerun only rollouts that failed, for any cause or those named.",
    ),
]


def run(
    suite: _Suite = None,
    *,
    harbor: _Harbor = None,
    agent: _Agent = None,
    concurrency: _Concurrency = None,
    server: _Server = None,
    admin_token: options.AdminToken = None,
    engine: _Engine = None,
    worker: _Workers = None,
    model: _Model = None,
    template: options.Template = None,
    seed: _Seed = None,
    set_keys: _Set = None,
    filters: _Filter = None,
    limit: _Limit = None,
    shuffle: _Shuffle = None,
    epochs: _Epochs = None,
    out: _Out = None,
    resume: _Resume = False,
    only: _Only = None,
    dry_run: options.DryRun = False,
    otlp: options.Otlp = None,
    as_json: options.Json = False,
) -> None:
    """Run a scenario or a suite of them and report on it.

    Exit codes: 0 passed, 1 checks failed, 2 interrupted, 3 internal error, 4 usage, 5 nothing selected, 6
    infrastructure failed.

    Examples: `harness run quickstart`, `harness run long_session -n 1 --seed 1`, `harness run runs/DIR --resume`,
    `harness run runs/DIR --resume --only failed:crashed`, `harness run quickstart --server http://127.0.0.1:8000`,
    `harness run quickstart --worker sglang=http://127.0.0.1:30000 --worker vllm=http://127.0.0.1:8001`
    """
    from harness.suite.record.config import Overrides, select
    from harness.suite.run.open_run import begin_run, resume_run
    from harness.suite.scenarios.validation import validate

    suite = suite if harbor is None else harbor
    if suite is None:
        raise ScenarioError(
            "expected a scenario, a suite or --harbor DIR, got none; `harness scenario list` lists some"
        )
    given = {
        "server": server,
        "engine": engine,
        "workers": worker or None,
        "model": model,
        "template": template,
        "agent": agent,
        "seed": seed,
        "settings": set_keys or None,
        "filter": filters or None,
        "limit": limit,
        "shuffle": shuffle,
        "epochs": epochs,
    }
    overrides = _settle(validate(Overrides, given, source="options"))
    failed = _read_only(only, resume=resume)
    otlp = options.require_collector(otlp)
    _refuse_collector(otlp, overrides)
    if dry_run:
        from harness.cli.runs.summary import print_dry_run

        if resume:
            raise RunError("expected --dry-run or --resume, got both: `harness show RUN` has what is left of a run")
        print_dry_run(select(suite, overrides), concurrency, as_json=as_json)
        return
    opened = (resume_run if resume else begin_run)(suite, overrides, out)
    _refuse_collector(otlp, opened.selection.config.overrides)  # a resumed run keeps its own
    numbers = None
    if failed is not None:
        numbers = failed.find(opened.directory)
        if not numbers:
            _say_none_failed(opened, only, as_json=as_json)
            return
        output.say(f"playing rollouts again that failed: {len(numbers)}; the records of before are kept")
    elif opened.directory.is_complete:
        raise typer.Exit(_say_finished(opened, as_json=as_json))
    is_resumed = resume and numbers is None
    end_run(execute_run(opened, concurrency, admin_token, numbers, otlp, is_resumed=is_resumed), as_json=as_json)


def end_run(report: "RunReport", *, as_json: bool) -> None:
    from harness.cli.runs.summary import print_report, report_json

    if as_json:
        output.print_json(report_json(report))
    else:
        print_report(report)
    raise typer.Exit(report.exit_code)


def _settle(given: "Overrides") -> "Overrides":
    """Check the options against each other, and complete addresses and paths. Raises `ScenarioError`."""
    from harness.lab.models.tokenizer_files import TEMPLATES, find_template
    from harness.rollouts.client.connections import server_url

    if given.workers and given.engine is not None:
        raise ScenarioError("expected --engine or --worker, got both: workers take the place of the engine")
    changes: dict[str, str] = {}
    if given.server is not None:
        changes["server"] = server_url(given.server)
        if given.engine is not None or given.workers or given.model is not None or given.template is not None:
            raise ScenarioError(
                "expected --server, or --engine, --worker, --model and --template, got both: a running server has its"
                " own engine, model and template"
            )
    if given.template is not None and given.template not in TEMPLATES:
        changes["template"] = str(find_template(given.template).resolve())
    return given.model_copy(update=changes)


def _read_only(only: str | None, *, resume: bool) -> "FailedOnly | None":
    """Return the rollouts that `--only` names, if given. Raises `RunError`."""
    from harness.suite.run.open_run import FailedOnly

    failed = None if only is None else FailedOnly.parse(only)
    if failed is not None and not resume:
        raise RunError("--only reruns rollouts of an earlier run: add --resume and name the run directory")
    return failed


def _say_none_failed(opened: "OpenedRun", only: str | None, *, as_json: bool) -> None:
    if as_json:
        output.print_json({"replayed": 0, "directory": str(opened.directory.path)})
    else:
        output.say(f"nothing to rerun: no rollout of {opened.directory.path} is {only}")


def _say_finished(opened: "OpenedRun", *, as_json: bool) -> int:
    """Print the result of a run that is complete, and return its exit code."""
    result = opened.directory.read_result()
    if as_json:
        output.print_json(result)
    else:
        output.say(f"already finished, {result['status']}: {opened.directory.result}")
    return int(result["exit_code"])


def _refuse_collector(otlp: str | None, overrides: "Overrides") -> None:
    """Raise `ScenarioError` if a run without its own session server should send spans."""
    if overrides.server is not None and otlp is not None:
        raise ScenarioError(
            "expected --server or --otlp (HARNESS_OTLP_ENDPOINT), got both: a session server sends the spans,"
            " and a running one got its collector at its start"
        )


def execute_run(
    opened: "OpenedRun",
    concurrency: int | None = None,
    admin_token: str | None = None,
    only: frozenset[int] | None = None,
    otlp: str | None = None,
    *,
    is_resumed: bool = False,
    goes_on: bool = False,
) -> "RunReport":
    from harness.cli.runs.progress import run_resumably
    from harness.suite.run.runner import SuiteRun

    return run_resumably(
        lambda progress, interrupts: SuiteRun(
            opened.selection,
            opened.directory,
            progress,
            interrupts,
            concurrency,
            admin_token=admin_token,
            only=only,
            goes_on=goes_on,
            otlp_endpoint=otlp,
        ).execute(),
        ["run", str(opened.directory.path)],
        is_resumed=is_resumed,
    )

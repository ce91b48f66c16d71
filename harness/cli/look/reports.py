"""`harness report`, `diff` and `audit`: figures of a run, of two side by side, and of its logprobs."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from harness.cli import options, output
from harness.errors import RunError

if TYPE_CHECKING:
    from harness.training.audit.audit import AuditReport

_Where = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or the file of a store.")]
_Out = Annotated[
    Path,
    typer.Option(
        metavar="PATH",
        help="Output file, whose suffix sets the format: .html, .md, .xml or .junit; with --format a new folder.",
    ),
]
_Plots = Annotated[bool, typer.Option("--plots", help="Add charts to the page; needs the extra `plots`.")]
_Format = Annotated[
    Literal["otel"] | None, typer.Option("--format", help="Write OpenTelemetry spans instead, into a new folder.")
]


def report(where: _Where, *, out: _Out, plots: _Plots = False, kind: _Format = None) -> None:
    """Write rewards, lengths, seconds, ends, drops and version lags of a run; for CI a test case per session.

    Exits with 0 after writing the report, even if the run failed.

    Examples: `harness report runs/DIR --out report.html --plots`, `harness report runs/DIR --out report.xml`, `harness
    report runs/DIR --out spans --format otel`
    """
    if kind is not None:
        from harness.viewer.spans import export_spans

        if plots:
            raise RunError(f"expected --plots without --format; got --format {kind}")
        missing: list[str] = []
        output.print_text(f"{out}: {export_spans(where, out, missing)} spans, {len(missing)} missing")
        return
    from harness.viewer.report_file import write_report

    found = write_report(where, out, plots=plots)
    output.print_text(f"{out}: {len(found.tables)} tables, {len(found.cases)} cases, {len(found.missing)} missing")


_What = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN [SESSION] RUN [SESSION]",
        help="Two run directories or stores, each followed by a session to compare two sessions.",
    ),
]
_SideBySide = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with both side by side.")]


def diff(
    what: _What, *, out: _SideBySide = None, tokenizer: options.ReadsTokens = None, as_json: options.Json = False
) -> None:
    """Compare outcomes, rewards, tokens and ledgers of two runs, and show where each pair of sessions diverges.

    Rollouts are paired by scenario, prompt and position in the group. Exits with 0 even if the runs differ.

    Examples: `harness diff runs/A runs/B`, `harness diff runs/A 3 runs/B 3`
    """
    from harness.viewer import terminal
    from harness.viewer.diff import compare_runs, compare_sessions
    from harness.viewer.diff_overview import run_diff_overview, session_diff_overview

    document: object
    match what:
        case [first, second] | [first, _, second, _] if out is not None:
            size = _write_page(out, Path(first), Path(second), what[1::2] if len(what) > 2 else [], tokenizer)
            output.print_result({"out": str(out), "bytes": size}, f"{out}: {size:,} bytes", as_json=as_json)
            return
        case [first, second]:
            runs = compare_runs(Path(first), Path(second), tokenizer)
            document, parts = runs, run_diff_overview(runs)
        case [first, one, second, other]:
            pair, missing = compare_sessions((Path(first), one), (Path(second), other), tokenizer)
            document = {"pair": pair, "missing": missing}
            parts = session_diff_overview(pair, missing)
        case _:
            raise RunError(f"expected RUN RUN, or RUN SESSION RUN SESSION, got {len(what)} arguments")
    if as_json:
        output.print_json(document)
    else:
        terminal.show(*parts)


def _write_page(out: Path, first: Path, second: Path, names: Sequence[str], tokenizer: Path | None) -> int:
    """Write the page of both runs, or of the sessions `names` of them. Return its length in bytes."""
    from harness.viewer.diff import pair_lines
    from harness.viewer.look import look_at, look_into, open_tokenizer
    from harness.viewer.page.run_page import Side, write_page

    sides = [Side(look_at(path, tokenizer), partial(look_into, path), None) for path in (first, second)]
    if names:
        found = [replace(side.view, sessions=[side.view.find(name)]) for side, name in zip(sides, names, strict=True)]
        sides = [side._replace(view=view) for side, view in zip(sides, found, strict=True)]
    ones, others = (side.view.sessions for side in sides)
    pairs = list(zip(ones, others, strict=True)) if names else pair_lines(ones, others)
    return write_page(out, *(side._replace(tokenizer=open_tokenizer(side.view)) for side in sides), pairs=pairs)


_SHOWN = 10

_Sessions = Annotated[list[str] | None, typer.Argument(metavar="SESSION", help="Ids of sessions.  [default: all]")]
_Weights = Annotated[
    list[str] | None,
    typer.Option(
        "--weights",
        metavar="VERSION=FOLDER",
        help="Weights of a version; may be repeated. The newest are the trainer's.  [default: the run's]",
    ),
]


def audit(where: _Where, session: _Sessions = None, *, weights: _Weights = None, as_json: options.Json = False) -> None:
    """Compare sampled tokens with forward passes of the trainer's weights, and name the causes of the gap.

    A run directory keeps the report as `audit.json`, for `harness view`, unless the run wrote one itself.

    Examples: `harness audit runs/DIR`, `harness audit sessions.db --weights 0=base --weights 1=step-1`
    """
    from harness.errors import RunError
    from harness.suite.record.rundir import RunDirectory
    from harness.suite.run.audited import audit_sessions, find_template, find_weights, keep_audit, open_template

    directory, is_run = RunDirectory(where), where.is_dir()
    known = (find_weights(directory) if is_run else {}) | dict(map(_version, weights or ()))
    store = directory.database if is_run else where
    if not store.is_file():
        raise RunError(f"expected a run directory or the file of a store, found no file {store}")
    template = find_template(directory, known) if is_run else open_template(known)
    found = audit_sessions(store, session or (), known, template, say=output.say)
    if is_run and not keep_audit(directory, found):
        output.say(f"{directory.audit}: stays as the run wrote it, with probes of its engine; remove it to replace it")
    output.print_result(found.to_json(), _describe_audit(found), as_json=as_json)


def _version(text: str) -> tuple[int, Path]:
    from harness.errors import RunError

    version, equals, folder = text.partition("=")
    if not version.isdecimal() or not equals or not Path(folder).is_dir():
        raise RunError(
            f"--weights: expected VERSION=FOLDER of a folder that exists, such as 3=checkpoints/3, got {text!r:.200}"
        )
    return int(version), Path(folder)


def _describe_audit(found: "AuditReport") -> str:
    lines = [f"{found.tokens:,} sampled tokens in {found.branches} branches: mean gap {found.attribution.gap:.3g} nats"]
    lines += [
        f"  {each.cause:<9} {each.nats:9.3g} nats  95 % interval {each.low:.3g} to {each.high:.3g}"
        for each in found.attribution.shares
    ]
    for name, rows in found.groups.items():
        means = ", ".join(f"{row['value']}: {row['gap']:.3g}" for row in rows[:_SHOWN])
        lines += [f"by {name}: {means}"] if len(rows) > 1 else []
    lines += [f"left out: {count:,} {what}" for what, count in found.left_out.items()]
    lines += [f"not probed: {cause}: {reason}" for cause, reason in found.not_probed.items()]
    return "\n".join([*lines, *found.verdicts])

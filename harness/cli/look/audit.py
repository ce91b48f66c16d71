"""`harness audit`: why an engine's logprobs differ from those of the trainer's weights."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli import options, output

if TYPE_CHECKING:
    from harness.training.audit.audit import AuditReport

_SHOWN = 10

_Where = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or the file of a store.")]
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
    output.print_result(found.to_json(), _describe(found), as_json=as_json)


def _version(text: str) -> tuple[int, Path]:
    from harness.errors import RunError

    version, equals, folder = text.partition("=")
    if not version.isdecimal() or not equals or not Path(folder).is_dir():
        raise RunError(
            f"--weights: expected VERSION=FOLDER of a folder that exists, such as 3=checkpoints/3, got {text!r:.200}"
        )
    return int(version), Path(folder)


def _describe(found: "AuditReport") -> str:
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

"""`harness resume`, `fork`, `values` and `replay`: a recorded session continues, is resampled or served again."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from harness.cli import options, output
from harness.errors import RunError
from harness.server.telemetry.printable import printable
from harness.suite.exits import ExitCode

if TYPE_CHECKING:
    from harness.types import Sample
    from harness.viewer.fork import Forks, Variation

_Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
_Session = Annotated[str, typer.Argument(metavar="SESSION", help="Number of the session, or a prefix of its id.")]
_At = Annotated[int, typer.Option(min=0, metavar="TURN", help="Turn to resample.")]
_Count = Annotated[int, typer.Option("--count", "-n", min=1, max=1000, help="Number of forks, run concurrently.")]
_Temperature = Annotated[float | None, typer.Option(min=0, help="Temperature of all sampled turns.")]
_SampledBy = Annotated[
    Literal["recorded", "current"],
    typer.Option(help="Require the recorded weights, or take the engine's current ones."),
]
_Edits = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MESSAGE=TEXT",
        help="New text for a tool result or user message that the turn adds, by message number; may be repeated.",
    ),
]
_Out = Annotated[Path | None, typer.Option(help="Folder for sessions and logs.  [default: not kept]")]


def resume(
    run: _Run, session: _Session, *, admin_token: options.AdminToken = None, as_json: options.Json = False
) -> None:
    """Play one rollout of a run again with its record: repeated calls get its answers, others are sampled.

    For a rollout that crashed or was cut short. The run keeps both records; the new attempt counts.

    Example: `harness resume runs/DIR 3`
    """
    from harness.cli.runs.run import end_run, execute_run
    from harness.suite.record.config import Overrides
    from harness.suite.run.open_run import resume_run
    from harness.viewer.look import look_at

    line = look_at(run).find(session)
    if line.number is None or line.session_id is None:
        raise RunError(f"expected the last session of a rollout of {run}, got {line.session_id or line.number}")
    opened = resume_run(str(run), Overrides(), run)
    end_run(execute_run(opened, None, admin_token, frozenset({line.number}), goes_on=True), as_json=as_json)


def fork(
    run: _Run,
    session: _Session,
    *,
    at: _At,
    count: _Count = 8,
    temperature: _Temperature = None,
    weights: _SampledBy = "recorded",
    edit: _Edits = None,
    out: _Out = None,
    admin_token: options.AdminToken = None,
    as_json: options.Json = False,
) -> None:
    """Begin again with the record of a session up to a turn, and print the reward of each fork.

    The mean is the value of the state before that turn. Nothing is written to the run; `--out` also gets the forks'
    samples.

    Examples: `harness fork runs/DIR 3 --at 2`, `harness fork runs/DIR 3 --at 2 -n 16 --out forks`,
    `harness fork runs/DIR 3 --at 2 --edit "5=No such file."`
    """
    from harness.viewer.fork import Variation

    variation = Variation(temperature, dict(map(_edit, edit or ())), weights == "current")
    [found] = _fork(run, session, at, count, out, admin_token=admin_token, variation=variation)
    if out is not None:
        _write_samples(found.samples, out)
    lines = [f"session {found.session_id}, turn {found.turn}, {len(found.forks)} forks"]
    for number, each in enumerate(found.forks):
        reward = "no reward" if each.reward is None else f"reward {each.reward:g}"
        left = "" if each.difference is None else f"; not counted, it diverged from the record at {each.difference}"
        lines.append(f"{number}: {each.outcome}, {reward}, {each.turns} turns, {each.trained} own tokens trained{left}")
    lines.append(f"value {_value(found)}")
    output.print_result(_document(found), printable("\n".join(lines)), as_json=as_json)


def values(
    run: _Run,
    session: _Session,
    *,
    count: _Count = 8,
    out: _Out = None,
    admin_token: options.AdminToken = None,
    as_json: options.Json = False,
) -> None:
    """Fork each trained turn of a session, and print the value of the state before it, with its 95 % interval.

    A turn is worth the next value less its own. `--out` also gets the session's samples with `turn_values`.

    Example: `harness values runs/DIR 3 -n 16`
    """
    from harness.viewer.fork import valued_samples

    found = _fork(run, session, None, count, out, admin_token=admin_token)
    if out is not None:
        _write_samples(valued_samples(run, found), out)
    lines = "\n".join(f"turn {each.turn}: {_value(each)}" for each in found)
    output.print_result({"turns": [_document(each) for each in found]}, printable(lines), as_json=as_json)


def _edit(text: str) -> tuple[int, str]:
    number, equals, content = text.partition("=")
    if not equals or not number.isdecimal():
        raise RunError(f"--edit: expected MESSAGE=TEXT, such as 5=No., got {text!r:.80}")
    return int(number), content


def _fork(
    run: Path,
    session: str,
    turn: int | None,
    count: int,
    out: Path | None,
    *,
    admin_token: str | None,
    variation: "Variation | None" = None,
) -> "Sequence[Forks]":
    import uvloop

    from harness.suite.run.interrupts import terminated_as_interrupted
    from harness.viewer.fork import Variation
    from harness.viewer.fork import fork as fork_session

    with terminated_as_interrupted(), options.empty_folder(out, "harness-fork-") as place:
        forking = fork_session(
            run,
            session,
            place.absolute(),
            variation or Variation(),
            turn=turn,
            count=count,
            say=output.say,
            admin_token=admin_token,
        )
        return uvloop.run(forking)


def _write_samples(samples: "Sequence[Sample]", place: Path) -> None:
    from harness.suite.record.rundir import RunDirectory

    RunDirectory(place).write_samples(samples)


def _value(found: "Forks") -> str:
    value = found.value
    if value is None:
        return "unknown: no fork has a reward that counts"
    return f"{value.mean:.3g}" + ("" if value.low is None else f" ({value.low:.3g} to {value.high:.3g})")


def _document(found: "Forks") -> dict[str, object]:
    forks = [
        {each.name: getattr(fork, each.name) for each in fields(fork) if each.name != "samples"} for fork in found.forks
    ]
    return {
        "session_id": found.session_id,
        "turn": found.turn,
        "forks": forks,
        "value": found.value and found.value._asdict(),
    }


_Agent = Annotated[str | None, typer.Option(help="Another agent: a bundled one, or a path.  [default: the scenario's]")]


def replay(
    run: _Run,
    session: _Session,
    *,
    agent: _Agent = None,
    out: _Out = None,
    tokenizer: options.ReadsTokens = None,
    as_json: options.Json = False,
) -> int:
    """Serve a recorded session again, without an engine: the same answers, while the agent sends the same requests.

    Exits with 0 if it did, and with 1 if it sent other or fewer requests: prints the first difference.

    Examples: `harness replay runs/DIR 3`, `harness replay runs/DIR 3 --agent ./agent.py --out again`
    """
    import uvloop

    from harness.suite.run.interrupts import terminated_as_interrupted
    from harness.viewer.replay import AGENT
    from harness.viewer.replay import replay as replay_session

    if agent is not None and Path(agent).is_file():  # paths are relative to here, not to the scenario's folder
        agent = str(Path(agent).absolute())
    with terminated_as_interrupted(), options.empty_folder(out, "harness-replay-") as workdir:
        (workdir / AGENT).mkdir()
        found = uvloop.run(replay_session(run, session, workdir.absolute(), agent=agent, tokenizer=tokenizer))
    said = f"{len(found.served)} turns of {found.session_id} answered; the agent: {found.outcome}\n"
    said += printable(found.difference or "it asked for the same")
    output.print_result(found, said, as_json=as_json)
    return ExitCode.PASSED if found.difference is None else ExitCode.CHECKS_FAILED

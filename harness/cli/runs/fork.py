"""`harness fork` and `harness values`: turns of a recorded session, sampled anew several times."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli import options, output

if TYPE_CHECKING:
    from harness.viewer.fork import Forks

_Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
_Session = Annotated[str, typer.Argument(metavar="SESSION", help="The number of one, or the beginning of its id.")]
_At = Annotated[int, typer.Option("--at", min=0, metavar="TURN", help="The turn to sample anew.")]
_Count = Annotated[int, typer.Option("--count", "-n", min=1, max=1000, help="Forks, which run at once.")]
_Out = Annotated[Path | None, typer.Option("--out", help="A folder for sessions and logs.  [default: none is kept]")]


def fork(
    run: _Run, session: _Session, *, at: _At, count: _Count = 8, out: _Out = None, as_json: options.Json = False
) -> int:
    """Begin again with the record of a session up to a turn, and print the reward of each fork.

    The mean is the value of the state before that turn. Nothing is written to the run.

    Examples: `harness fork runs/DIR 3 --at 2`, `harness fork runs/DIR 3 --at 2 -n 16 --out forks`
    """
    [found] = _fork(run, session, at, count, out)
    lines = [f"session {found.session_id}, turn {found.turn}, {len(found.forks)} forks"]
    for number, each in enumerate(found.forks):
        reward = "no reward" if each.reward is None else f"reward {each.reward:g}"
        lines.append(f"{number}: {each.outcome}, {reward}, {each.turns} turns, {each.trained} own tokens trained")
    return _print([*lines, f"value {_value(found)}"], _document(found), as_json=as_json)


def values(run: _Run, session: _Session, *, count: _Count = 8, out: _Out = None, as_json: options.Json = False) -> int:
    """Fork each trained turn of a session, and print the value of the state before it, with its 95 % interval.

    A turn is worth the next value less its own.

    Example: `harness values runs/DIR 3 -n 16`
    """
    found = _fork(run, session, None, count, out)
    lines = [f"turn {each.turn}: {_value(each)}" for each in found]
    return _print(lines, {"turns": [_document(each) for each in found]}, as_json=as_json)


def _fork(run: Path, session: str, turn: int | None, count: int, out: Path | None) -> "Sequence[Forks]":
    from contextlib import ExitStack
    from tempfile import TemporaryDirectory

    import uvloop

    from harness.errors import RunError
    from harness.suite.run.interrupts import terminated_as_interrupted
    from harness.viewer.fork import fork as fork_session

    with terminated_as_interrupted(), ExitStack() as stack:
        if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise RunError(f"{out} exists and is not empty; choose another --out")
        place = out or Path(stack.enter_context(TemporaryDirectory(prefix="harness-fork-")))
        place.mkdir(parents=True, exist_ok=True)
        return uvloop.run(fork_session(run, session, place.absolute(), turn=turn, count=count, say=output.say))


def _value(found: "Forks") -> str:
    if found.value is None:
        return "unknown: no fork has a reward"
    return f"{found.value:.3g}" + ("" if found.half_width is None else f" ± {found.half_width:.3g}")


def _document(found: "Forks") -> dict[str, object]:
    from msgspec import to_builtins

    return {**to_builtins(found), "value": found.value, "half_width": found.half_width}


def _print(lines: list[str], document: dict[str, object], *, as_json: bool) -> int:
    from harness.server.telemetry.printable import printable
    from harness.suite.exits import ExitCode

    output.print_result(document, printable("\n".join(lines)), as_json=as_json)
    return ExitCode.PASSED

"""`harness fork`: a turn of a recorded session, sampled anew several times."""

from pathlib import Path
from typing import Annotated

import typer

from harness.cli import options, output

_Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.", show_default=False)]
_Session = Annotated[
    str, typer.Argument(metavar="SESSION", help="The number of one, or the beginning of its id.", show_default=False)
]
_At = Annotated[int, typer.Option("--at", min=0, metavar="TURN", help="The turn to sample anew.", show_default=False)]
_Count = Annotated[int, typer.Option("--count", "-n", min=1, max=1000, help="Forks, which run at once.")]
_Out = Annotated[
    Path | None,
    typer.Option("--out", help="A folder for sessions and logs.  [default: none is kept]", show_default=False),
]


def fork(
    run: _Run,
    session: _Session,
    *,
    at: _At,
    count: _Count = 8,
    out: _Out = None,
    as_json: options.Json = False,
) -> int:
    """Begin again with the record of a session up to a turn, and print the reward of each fork.

    The mean is the value of that turn's state. Nothing is written to the run.

    Examples: `harness fork runs/DIR 3 --at 2`, `harness fork runs/DIR 3 --at 2 -n 16 --out forks`
    """
    from contextlib import ExitStack
    from tempfile import TemporaryDirectory

    import uvloop
    from msgspec import to_builtins

    from harness.errors import RunError
    from harness.server.telemetry.printable import printable
    from harness.suite.exits import ExitCode
    from harness.suite.run.interrupts import terminated_as_interrupted
    from harness.viewer.fork import fork as fork_session

    with terminated_as_interrupted(), ExitStack() as stack:
        if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise RunError(f"{out} exists and is not empty; choose another --out")
        place = out or Path(stack.enter_context(TemporaryDirectory(prefix="harness-fork-")))
        place.mkdir(parents=True, exist_ok=True)
        found = uvloop.run(fork_session(run, session, place.absolute(), turn=at, count=count, say=output.say))
    lines = [f"session {found.session_id}, turn {found.turn}, {len(found.forks)} forks"]
    for number, each in enumerate(found.forks):
        reward = "no reward" if each.reward is None else f"reward {each.reward:g}"
        lines.append(f"{number}: {each.outcome}, {reward}, {each.turns} turns, {each.trained} own tokens trained")
    if found.value is not None:
        spread = "" if found.half_width is None else f" ± {found.half_width:.3g}"
        lines.append(f"value {found.value:.3g}{spread}")
    document = {**to_builtins(found), "value": found.value, "half_width": found.half_width}
    output.print_result(document, printable("\n".join(lines)), as_json=as_json)
    return ExitCode.PASSED

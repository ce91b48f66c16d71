"""`harness replay`: a recorded session, served again to its agent or another one."""

from pathlib import Path
from typing import Annotated

import typer

from harness.cli import options, output
from harness.server.telemetry.printable import printable
from harness.suite.exits import ExitCode

_Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
_Session = Annotated[str, typer.Argument(metavar="SESSION", help="Number of the session, or a prefix of its id.")]
_Agent = Annotated[str | None, typer.Option(help="Another agent: a bundled one, or a path.  [default: the scenario's]")]
_Out = Annotated[Path | None, typer.Option(help="Folder for the agent's log and the session.  [default: not kept]")]


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

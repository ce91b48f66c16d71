"""`harness exec` and `harness env`: a session for any command line.

`exec` runs the command in the session's environment, and an agent's if named, and prints the record. The rollout's
files get their own folder; the working directory is the user's. `env` creates a session and prints its variables.
"""

import asyncio
import codecs
import json
import os
import shlex
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli import options, output
from harness.errors import Cause, ScenarioError
from harness.server.telemetry.printable import printable
from harness.suite.exits import ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.rollouts.client.session_server import SessionHandle, SessionServerClient
    from harness.samples.rollout import Rollout
    from harness.types import Json

_Server = Annotated[str, options.option("HARNESS_SERVER", "A running session server.", metavar="URL")]
_Agent = Annotated[
    str | None, typer.Option(help="Provide this agent's programs, variables and files; see `harness agent list`.")
]
_URL = "http://127.0.0.1:8000"
_PIECE = 8_192  # bytes of output at a time: `printable` cuts what is longer


def execute(
    command: Annotated[list[str] | None, typer.Argument(metavar="[-- COMMAND]", help="[default: --agent's]")] = None,
    *,
    agent: _Agent = None,
    server: _Server = _URL,
    admin_token: options.AdminToken = None,
    instruction: Annotated[str, typer.Option(help="Passed to the command in HARNESS_INSTRUCTION and in a file.")] = "",
    workdir: Annotated[
        Path | None,
        typer.Option(help="Working directory of the command.  [default: runs/exec-<time>, which keeps its log]"),
    ] = None,
    selection: Annotated[
        str | None, typer.Option(help="Branches that become samples: `all`, `one`, or a function of the server.")
    ] = None,
    matching: Annotated[
        list[str] | None, typer.Option(help="Differences to ignore in the history sent back; may be repeated.")
    ] = None,
    session: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Another setting of the session, in JSON or a word; may be repeated."),
    ] = None,
    interactive: Annotated[
        bool, typer.Option("--interactive", "-i", help="Connect the command to this terminal.")
    ] = False,
    deadline: Annotated[float, typer.Option(min=1, help="Deadline of the command, in seconds.")] = 3600.0,
    as_json: options.Json = False,
) -> None:
    """Run a command line in a session of its own, then print the record and the samples.

    The command's output goes to standard error as it comes.

    Exit codes: 0 it ended by itself or at a limit of the session, 1 it failed, 6 the server or its engine failed.

    Examples: `harness exec --agent codex --instruction "Count the files."`, `harness exec -- python my_agent.py`
    """
    from harness.cli.runs.terminal import open_terminal
    from harness.rollouts.agents.profile import literal
    from harness.rollouts.agents.programs import bundled_profile, prepare_profile, with_own_program
    from harness.rollouts.agents.task import AgentTask, ProgramAgent
    from harness.rollouts.client.connections import server_url
    from harness.rollouts.manager import SessionManager
    from harness.samples.rollout import ENDED_WELL
    from harness.suite.run.interrupts import terminated_as_interrupted

    profile = None if agent is None else bundled_profile(agent)
    if not command and profile is None:
        raise ScenarioError("nothing to run: expected -- COMMAND, or --agent NAME for that agent's own")
    if workdir is not None:
        try:
            workdir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ScenarioError(f"--workdir {workdir}: expected a directory: {error}") from error
    settings = _settings(selection, matching, session)

    async def play(model: str) -> "tuple[Rollout, Path]":
        program = ProgramAgent("exec", ()) if profile is None else await prepare_profile(profile, output.say)
        if command:
            words = with_own_program(profile, [literal(word) for word in command]) if profile is not None else command
            program = replace(program, command=tuple(words), key_in_environment=True)
        folder = _new_folder()
        task = AgentTask(program, instruction, folder, model, deadline_s=deadline, session=settings, cwd=workdir)
        async with SessionManager(server_url(server), admin_token=admin_token) as manager:
            if interactive:
                async with open_terminal() as terminal:
                    return await manager.run(replace(task, terminal=terminal)), folder
            return await manager.run(replace(task, on_output=_shower())), folder

    with terminated_as_interrupted():
        rollout, folder = asyncio.run(play(options.ask_named(server, admin_token, _model)))
    if as_json:
        output.print_json(_to_json(rollout, folder, workdir or folder))
    else:
        _print(rollout, folder)
    if rollout.outcome.kind not in ENDED_WELL:
        is_ours = rollout.outcome.cause in (Cause.ENGINE, Cause.HARNESS)
        raise typer.Exit(ExitCode.INFRASTRUCTURE if is_ours else ExitCode.CHECKS_FAILED)


def env(
    *,
    agent: _Agent = None,
    server: _Server = _URL,
    admin_token: options.AdminToken = None,
    home: Annotated[
        Path | None, typer.Option(help="New home directory, for an agent that is configured by files.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Create a session and print its client's variables, for `eval`. The session stays until it is ended.

    Examples: `eval "$(harness env)"`, `harness env --agent langgraph --json`
    """
    from harness.rollouts.agents.agent_environment import claim_home, client_variables, with_expanded, write_home
    from harness.rollouts.agents.programs import bundled_profile, variables_of

    profile = None if agent is None else bundled_profile(agent)
    if profile is not None and profile.spec.files and home is None:
        raise ScenarioError(f"{profile.name} is configured by files: pass --home DIR, which is made for it")
    if home is not None:
        claim_home(home)
    wanted = {} if profile is None else profile.spec.session.to_json()

    async def create(client: "SessionServerClient") -> "tuple[SessionHandle, str]":
        model = await _model(client)
        return await client.create(wanted), model

    session, model = options.ask_named(server, admin_token, create)
    variables = client_variables(session, model)
    if home is not None:
        variables["HOME"] = str(home.absolute())
    if profile is not None:
        base = {"HOME": os.environ.get("HOME", "")} | variables
        expanded = with_expanded(base, variables_of(profile, os.environ, in_front=True))
        variables = {name: value for name, value in expanded.items() if name in variables or value != base.get(name)}
        if home is not None:
            write_home(profile.spec.files, home, expanded)
    lines = (f"export {name}={shlex.quote(value)}" for name, value in variables.items())
    output.print_result({"session_id": session.session_id, "variables": variables}, "\n".join(lines), as_json=as_json)


def _settings(selection: str | None, matching: list[str] | None, more: list[str] | None) -> "Json":
    settings: Json = {} if selection is None else {"selection": selection}
    if matching is not None:
        settings["matching"] = matching
    for assignment in more or ():
        key, equals, value = assignment.partition("=")
        if not key or not equals:
            raise ScenarioError(f"--session: expected KEY=VALUE, got {assignment!r}")
        try:
            settings[key] = json.loads(value)
        except ValueError:
            settings[key] = value
    return settings


def _shower() -> "Callable[[bytes], None]":
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def show(data: bytes) -> None:
        for at in range(0, len(data), _PIECE):
            sys.stderr.write(printable(decoder.decode(data[at : at + _PIECE])))
        sys.stderr.flush()

    return show


def _new_folder() -> Path:
    """Create an empty folder for this rollout, even if others start in the same second."""
    from harness.suite.record.rundir import new_run_path

    while True:
        folder = new_run_path("exec")
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder


async def _model(client: "SessionServerClient") -> str:
    from harness.rollouts.client.session_server import GREETING_S

    return str((await client.describe(deadline_s=GREETING_S)).serves["model"])


def _to_json(rollout: "Rollout", folder: Path, workdir: Path) -> dict[str, Any]:
    from harness.samples.codec import sample_to_json

    outcome = rollout.outcome
    return {
        "session_id": rollout.session_id,
        "outcome": {"kind": outcome.kind, "cause": outcome.cause, "detail": outcome.detail},
        "folder": str(folder),
        "workdir": str(workdir),
        "session": rollout.session,
        "samples": [sample_to_json(sample) for sample in rollout.samples],
    }


def _print(rollout: "Rollout", folder: Path) -> None:
    output.print_text(f"{rollout.outcome.kind}: {rollout.outcome.detail}; its log is {folder / 'agent.log'}")
    for turn in rollout.session["turns"]:
        about = f"turn {turn['turn']}: {turn['prompt_length']} + {turn['output_length']} tokens, {turn['end']}"
        output.print_text(about if turn["role"] == "main" else f"{about}; {turn['role']}: {turn['evidence']}")
    for number, sample in enumerate(rollout.samples):
        turns = ", ".join(str(turn) for turn in sample.metadata["turns"])
        trained = int(sample.loss_mask.sum())
        output.print_text(f"sample {number}: turns {turns}; {sample.tokens.size} tokens, {trained} trained")
    ledger = rollout.session["ledger"]
    dropped = ", ".join(f"{count} {reason}" for reason, count in ledger["dropped"].items()) or "none"
    output.print_text(f"ledger: {ledger['generated']} generated, {ledger['trained']} trained, dropped: {dropped}")
    for remark in rollout.session["remarks"]:
        output.print_text(remark)

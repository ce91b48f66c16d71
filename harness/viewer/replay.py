"""A recorded session served to an agent again, without an engine: to debug agents and test for regressions.

A replay resumes a copy of the record (`sessions.inheritance`) on an engine that refuses whatever the record does not
answer. Scenario settings are the recorded ones; the agent and its files are today's. Nothing is written to the run.
"""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from harness.engines.scripted import ScriptedEngine
from harness.errors import EngineRejected, MalformedRequest, PreviousResponseNotFound, ResponseNotFound, RunError
from harness.machine.deadlines import beside
from harness.rollouts.manager import SessionManager
from harness.server.http.access import new_admin_token
from harness.server.serving import serve
from harness.server.settings import ServerSettings
from harness.server.store.sqlite import SQLiteStore, read_record, read_rows
from harness.sessions.admission import Limits
from harness.sessions.inheritance import turns_to_inherit
from harness.sessions.session import Session
from harness.sessions.session_config import Inheritance
from harness.suite.record.config import RunConfig
from harness.suite.record.rundir import RunDirectory, read_lock
from harness.suite.run.services import EngineChoice
from harness.suite.scenarios.folder import INSTRUCTION_FILE, load_scenario
from harness.suite.scenarios.plan import PlannedRollout, open_agent, plan_rollouts
from harness.tokens.model_family import open_chat_tokenizer
from harness.turn_ends import TurnStatus
from harness.types import GenerationRequest, GenerationResult
from harness.viewer.look import look_at
from harness.viewer.run_view import SessionLine, end_words, say_missing

STORE = "sessions.db"
"""Replayed session, in the replay's folder."""
AGENT = "agent"
"""Agent's files and log, in the replay's folder."""


# Refusals that depend on the request alone, not on a gate, engine, limit or deadline.
_BY_THEIR_WORDS = (MalformedRequest.code, ResponseNotFound.code, PreviousResponseNotFound.code)
# Most agents end by themselves after a refusal.
_GRACE_S = 5.0
_STOP_S = 4.0


@dataclass(frozen=True, slots=True)
class Replay:
    session_id: str
    again: str | None
    """Replayed session."""
    served: list[int]
    difference: str | None
    """First difference in the agent's behavior, or None."""
    outcome: str
    detail: str


async def replay(run: Path, name: str, place: Path, *, agent: str | None, tokenizer: Path | None) -> Replay:
    """Replay the session `name` of `run` in the folder `place`, with the scenario's agent or `agent`.

    Raises `RunError` if the session or an answer is missing or the prompt has changed, `StoreError` without its tokens,
    `AgentError` if the agent cannot be prepared.
    """
    view = await asyncio.to_thread(look_at, run)
    line = view.find(name)
    planned = await asyncio.to_thread(plan_again, run, line)
    if agent is not None:
        scenario = planned.folder.scenario
        spec = scenario.agent.model_copy(update={"profile": agent, "function": None})
        played = scenario.model_copy(update={"agent": spec})
        planned = replace(planned, folder=replace(planned.folder, scenario=played))
    folder = tokenizer or view.tokenizer
    if folder is None:
        raise RunError(f"the tokenizer of {run} is not on this machine: name its folder with --tokenizer")
    assert line.session_id is not None  # `plan_again` has seen to it
    session = await copy_session(RunDirectory(run), line.session_id, place / STORE)
    chat_tokenizer = await asyncio.to_thread(open_chat_tokenizer, folder, template_file=planned.folder.find_template())
    engine = _NoEngine(chat_tokenizer.tokenizer, model=_model_name(run, planned))
    inherits = Inheritance(line.session_id)
    inherited = {turn.index for turn in turns_to_inherit(session, inherits, Limits(), None)}
    if not inherited:
        raise RunError(f"expected a session with an answer to serve again, and no turn of {line.session_id} has one")
    answers = [turn for turn in session.turns if turn.status in (TurnStatus.COMPLETED, TurnStatus.TRUNCATED)]
    if behind := next((turn for turn in answers if turn.index not in inherited), None):
        raise RunError(f"turn {behind.index} of {line.session_id} follows a cut one, and a replay serves no such turn")
    prompt = await asyncio.to_thread(planned.read_prompt)
    settings = ServerSettings(
        admin_token=new_admin_token(), score_inputs=False, allow_forced_tokens=planned.folder.scenario.forces_tokens
    )
    async with (
        open_agent(planned.folder) as player,
        serve(engine, chat_tokenizer, SQLiteStore(place / STORE), settings) as server,
        SessionManager(server.url, admin_token=settings.admin_token) as manager,
    ):
        task = planned.task(player, prompt, place / AGENT, engine.capabilities.model)
        async with beside(_end_parted(engine, manager), name="end an agent that asks on"):
            session_keys = {
                key: value for key, value in task.session.items() if key != "matching"
            }  # the record's stays
            rollout = await manager.run(replace(task, inherits=inherits, session=session_keys))
    kind, detail = str(rollout.outcome.kind), rollout.outcome.detail
    if rollout.session_id is None:
        raise RunError(detail)
    difference = end_words(rollout.session["inherits"]) or None
    if difference is None and line.refusals is not None:
        difference = _other_refusals(line.refusals, rollout.session["refusals"])
    served = [turn["turn"] for turn in rollout.session["turns"] if turn["notes"].get("asked_again")]
    return Replay(line.session_id, rollout.session_id, served, difference, kind, detail)


def _other_refusals(recorded: Mapping[str, int], again: Mapping[str, int]) -> str | None:
    for code in _BY_THEIR_WORDS:
        then, now = recorded.get(code, 0), again.get(code, 0)
        if then != now:
            return f"the session server refused {now} of the agent's requests as {code}, and {then} of the record's"
    return None


class _NoEngine(ScriptedEngine):
    parted: asyncio.Event
    """Set once the agent has left the record."""

    async def __aenter__(self) -> Self:
        self.parted = asyncio.Event()
        return self

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.parted.set()
        raise EngineRejected("the record has no answer")


async def copy_session(directory: RunDirectory, session_id: str, target: Path) -> Session:
    """Copy a session of a run that has ended into the store `target`, closed. Return it."""
    database = directory.database
    record = await asyncio.to_thread(read_record, database, session_id)
    if record.session.is_open:  # it still lives, unless its run was killed
        with directory.occupy():
            pass
    if record.session.records_rows:
        record.session.put_rows(await asyncio.to_thread(read_rows, database, session_id))
    async with SQLiteStore(target) as store:
        store.tokenizer = record.tokenizer
        await store.create(record.session)
        record.session.close()
        await store.set_phase(record.session)
    return record.session


async def _end_parted(engine: _NoEngine, manager: SessionManager) -> None:
    # Few of the agent's requests after the first difference are in the record.
    await engine.parted.wait()
    await asyncio.sleep(_GRACE_S)
    await manager.stop_agents(_STOP_S)


def plan_again(run: Path, line: SessionLine) -> PlannedRollout:
    """Return the rollout of `line` as it was planned. Raises `RunError` if its prompt has changed."""
    if line.number is None or line.session_id is None:
        raise RunError(
            f"expected a rollout that came to a session, which a run directory says who played;"
            f" got {line.session_id or line.number} of {run}"
        )
    entries = RunConfig.load(RunDirectory(run).config).scenarios
    folders = [replace(load_scenario(Path(entry.directory)), scenario=entry.scenario) for entry in entries]
    plans = plan_rollouts(folders)
    planned = next((plan.find(line.number) for plan in plans if line.number in plan.numbers), None)
    if planned is None or (planned.folder.name, planned.seed) != (line.scenario, line.seed):
        raise RunError(
            f"the configuration in {run} has no rollout {line.number} of {line.scenario}: it is of another run"
        )
    folder = planned.folder
    if folder.prompts.task_of(planned.read_prompt()) is not None:
        raise RunError(f"rollout {line.number} is a Harbor task, whose agent plays only in the task's own sandbox")
    recorded = next(entry.files for entry in entries if entry.scenario.name == folder.name)
    said = [os.path.relpath(path, folder.directory) for path in folder.prompts.files]
    said += [INSTRUCTION_FILE] if planned.read_prompt().text is None else []
    said += [folder.scenario.engine.template] if folder.scenario.engine.template in recorded else []
    said += [str(folder.scenario.engine.script)] if folder.scenario.forces_tokens else []
    changed = [name for name in said if folder.digests().get(name) != recorded.get(name)]
    if changed:
        raise RunError(
            f"{folder.directory / changed[0]} is not what it was when {run} was made; undo that to replay it"
        )
    return planned


def _model_name(run: Path, planned: PlannedRollout) -> str:
    name = "recorded"
    with say_missing("the name of its model", []):
        digests = read_lock(RunDirectory(run).lock)["digests"]
        name = str(digests[EngineChoice.of(planned.folder).key]["model"])
    return name  # noqa: RET504  # the block may end without one

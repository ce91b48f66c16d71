"""Forks of a recorded rollout: its record up to a turn, which is sampled anew several times, and scored.

Scenario settings are the recorded ones; engine, agent and check are today's. Forks write nothing to the run: their own
store begins with a copy of the session.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev

from harness.errors import RunError
from harness.samples.rollout import Rollout
from harness.server.store.sqlite import SQLiteStore, read_record, read_rows
from harness.sessions.session import Session
from harness.suite.judge.reward import score_session
from harness.suite.record.lock import check_same_engine, read_lock
from harness.suite.record.rundir import RunDirectory
from harness.suite.run.services import EngineChoice, serve_engine
from harness.suite.scenarios.agent import open_agent
from harness.suite.scenarios.plan import PlannedRollout
from harness.viewer.look import look_at
from harness.viewer.replay import plan_again

STORE = "forks.db"
"""Sessions of the forks, in their folder."""

_NORMAL_95 = 1.96


@dataclass(frozen=True, slots=True)
class Fork:
    """One rollout from the forked turn on."""

    session_id: str | None
    outcome: str
    detail: str
    reward: float | None
    turns: int
    trained: int
    """Tokens of its own that a trainer gets."""


@dataclass(frozen=True, slots=True)
class Forks:
    """Result of forking one turn."""

    session_id: str
    """Forked session."""
    turn: int
    forks: Sequence[Fork]

    @property
    def rewards(self) -> list[float]:
        """Known rewards."""
        return [fork.reward for fork in self.forks if fork.reward is not None]

    @property
    def value(self) -> float | None:
        """Mean reward: the Monte Carlo value of the state before the turn; None without rewards."""
        return fmean(self.rewards) if self.rewards else None

    @property
    def half_width(self) -> float | None:
        """Half of the 95 % normal interval of `value`; None below two rewards."""
        return _NORMAL_95 * stdev(self.rewards) / len(self.rewards) ** 0.5 if len(self.rewards) > 1 else None


async def fork(
    run: Path, name: str, place: Path, *, turn: int | None, count: int, say: Callable[[str], None]
) -> list[Forks]:
    """Sample `turn` of the session `name` of `run` anew, `count` times, with files in the folder `place`.

    Without `turn`, each trained turn, in order of admission. Raises `RunError` if the session, its prompt or its engine
    is not what it was, or has no such turn.
    """
    view = await asyncio.to_thread(look_at, run)
    line = view.find(name)
    planned = await asyncio.to_thread(plan_again, run, line)
    session_id = str(line.session_id)
    session = await _copy_session(RunDirectory(run).database, session_id, place / STORE)
    turns = [each.index for each in session.turns if session.plan().is_trained(each)] if turn is None else [turn]
    choice = EngineChoice.of(planned.folder)
    async with serve_engine(choice, place / STORE, say) as services, open_agent(planned.folder) as agent:
        check_same_engine(read_lock(RunDirectory(run).lock)["digests"].get(choice.key, {}), services.identity)
        prompt = await asyncio.to_thread(planned.read_prompt)
        task = planned.task(agent, prompt, place, services.model)
        async with services.open_manager() as manager:
            found = []
            for number in turns:
                here = replace(task, workdir=place / f"turn-{number}")
                rollouts = await manager.fork(session_id, here, turn=number, count=count)
                refused = next((each for each in rollouts if each.session_id is None), None)
                if refused is not None:
                    raise RunError(f"turn {number} of {session_id}: {refused.outcome.detail}")
                found.append(Forks(session_id, number, [await _score(planned, rollout) for rollout in rollouts]))
    return found


async def _copy_session(database: Path, session_id: str, target: Path) -> Session:
    record = await asyncio.to_thread(read_record, database, session_id)
    if record.session.records_rows:
        record.session.put_rows(await asyncio.to_thread(read_rows, database, session_id))
    async with SQLiteStore(target) as store:
        store.tokenizer = record.tokenizer
        await store.create(record.session)
        record.session.close()
        await store.set_phase(record.session)
    return record.session


async def _score(planned: PlannedRollout, rollout: Rollout) -> Fork:
    check, reward = planned.folder.check, None
    if check is not None:
        prompt = planned.read_prompt()
        metadata = prompt.metadata | prompt.check_metadata
        deadline_s = planned.folder.scenario.checks.check_deadline_s
        score = await score_session(check, rollout.session, rollout.agent_result, metadata, deadline_s=deadline_s)
        reward = score.reward
    return Fork(
        rollout.session_id,
        str(rollout.outcome.kind),
        rollout.outcome.detail,
        reward,
        len(rollout.session["turns"]),
        sum(int(sample.loss_mask.sum()) for sample in rollout.samples),
    )

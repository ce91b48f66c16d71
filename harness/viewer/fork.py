"""Forks of a recorded rollout: its record up to a turn, which is sampled anew several times, and scored.

Scenario settings are the recorded ones; engine, agent and check are today's. Forks write nothing to the run: their own
store begins with a copy of the session. A fork whose agent leaves the record before the turn has no say in its value.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.errors import RunError
from harness.samples.rollout import Rollout
from harness.samples.turn_rewards import TurnValue
from harness.samples.turn_values import value_turns
from harness.server.store.sqlite import SQLiteStore, read_record, read_rows
from harness.sessions.divergence import Divergence
from harness.sessions.inheritance import find_drift
from harness.sessions.record import RecordIds, session_record
from harness.sessions.session import Session
from harness.suite.judge.groups import value_of
from harness.suite.judge.reward import score_session
from harness.suite.record.lock import check_same_engine, read_lock
from harness.suite.record.rollout_table import read_rollouts
from harness.suite.record.rundir import RunDirectory
from harness.suite.run.services import EngineChoice, serve_engine
from harness.suite.scenarios.agent import open_agent
from harness.suite.scenarios.plan import PlannedRollout
from harness.types import Sample
from harness.viewer.family import end_words
from harness.viewer.look import look_at
from harness.viewer.replay import plan_again

STORE = "forks.db"
"""Sessions of the forks, in their folder."""


@dataclass(frozen=True, slots=True)
class Variation:
    """Differences of the forks from the recorded rollout."""

    temperature: float | None = None
    edits: Mapping[int, str] = field(default_factory=dict)
    """Other texts of messages that the turn adds, by index."""
    current_weights: bool = False
    """Sample with what the engine serves, and not only with the recorded weights."""


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
    samples: Sequence[Sample]
    """Without inherited tokens to train, which the forked session's samples have."""
    difference: str | None = None
    """Place where its agent left the record before the turn, so that its reward does not count."""


@dataclass(frozen=True, slots=True)
class Forks:
    session_id: str
    turn: int
    forks: Sequence[Fork]

    @property
    def rewards(self) -> list[float]:
        """Rewards of the forks that reached the turn as recorded."""
        return [each.reward for each in self.forks if each.reward is not None and each.difference is None]

    @property
    def value(self) -> TurnValue | None:
        """Monte Carlo value of the state before the turn; None without rewards."""
        return value_of(self.rewards)

    @property
    def samples(self) -> list[Sample]:
        """Samples of the forks, siblings of one group."""
        return [
            replace(sample, reward=fork.reward, index=number, group_index=0)
            for number, fork in enumerate(self.forks)
            for sample in fork.samples
        ]


async def fork(
    run: Path, name: str, place: Path, variation: Variation, *, turn: int | None, count: int, say: Callable[[str], None]
) -> list[Forks]:
    """Sample `turn` of the session `name` of `run` anew, `count` times, with files in the folder `place`.

    Without `turn`, each trained turn, in order of admission. Raises `RunError` if the session lives, or if it, its
    prompt, its engine or its weights are not what they were, or has no such turn.
    """
    view = await asyncio.to_thread(look_at, run)
    line = view.find(name)
    planned = await asyncio.to_thread(plan_again, run, line)
    session_id = str(line.session_id)
    session = await _copy_session(RunDirectory(run), session_id, place / STORE)
    turns = [each.index for each in session.turns if session.plan().is_trained(each)] if turn is None else [turn]
    choice = EngineChoice.of(planned.folder)
    async with serve_engine(choice, place / STORE, say) as services, open_agent(planned.folder) as agent:
        recorded = read_lock(RunDirectory(run).lock)["digests"].get(choice.key, {})
        if variation.current_weights:
            recorded = {**recorded, "weights_digest": services.identity["weights_digest"]}
        check_same_engine(recorded, services.identity, "fork with that one; --weights current allows other weights")
        if not variation.current_weights:
            _require_same_weights(session, turns, {status.weight_version for status in services.engine.workers})
        prompt = await asyncio.to_thread(planned.read_prompt)
        task = planned.task(agent, prompt, place, services.model)
        if variation.temperature is not None:
            sampling = {**task.session["sampling"], "temperature": variation.temperature}
            task = replace(task, session={**task.session, "sampling": sampling})
        async with services.open_manager() as manager:
            found = []
            for number in turns:
                here = replace(task, workdir=place / f"turn-{number}")
                rollouts = await manager.fork(session_id, here, turn=number, count=count, edits=variation.edits)
                refused = next((each for each in rollouts if each.session_id is None), None)
                if refused is not None:
                    raise RunError(f"turn {number} of {session_id}: {refused.outcome.detail}")
                forks = [
                    replace(await _score(planned, each), difference=_difference(session, number, each, variation))
                    for each in rollouts
                ]
                found.append(Forks(session_id, number, forks))
    return found


def valued_samples(run: Path, found: Sequence[Forks]) -> list[Sample]:
    """Return the samples of the session whose turns were forked, with `turn_values`. Raises `StoreError`."""
    values = {each.turn: each.value for each in found if each.value is not None}
    forked = {each.session_id for each in found}
    records = read_rollouts(RunDirectory(run).database).values()
    samples = (record.export_samples() for record in records if record.session_id in forked)
    return [valued for each in samples for valued in value_turns(each, values)]


async def _copy_session(directory: RunDirectory, session_id: str, target: Path) -> Session:
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


def _require_same_weights(session: Session, turns: Sequence[int], live: Set[str]) -> None:
    for turn in session.turns:
        sampled = turn.version_spans[-1].version if turn.version_spans else None
        if turn.index in turns and sampled is not None and {sampled} != live:
            raise RunError(
                f"turn {turn.index} was sampled by the weights {sampled}, the engine serves {', '.join(sorted(live))};"
                " --weights current samples it with those"
            )


def _difference(session: Session, turn: int, fork: Rollout, variation: Variation) -> str | None:
    record = session_record(session, RecordIds.NONE)
    found = find_drift(record, turn, fork.session, variation.edits, session.normal_form)
    if found is None:
        return None
    inherits = fork.session["inherits"]
    told = {**inherits, "difference": found.to_json()} if isinstance(found, Divergence) else inherits
    return (told and end_words(told)) or "its last call: it did not come to the turn"


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
        rollout.samples,
    )

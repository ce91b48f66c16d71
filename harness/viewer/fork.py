"""Forks of a recorded rollout: its record up to a turn, which is resampled several times, and scored.

Scenario settings are the recorded ones; engine, agent and check are today's. Forks write nothing to the run: their own
store begins with a copy of the session, unless a server of others has it. A fork whose agent leaves the record before
the turn has no say in its value.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.errors import RunError
from harness.rollouts.client.session_server import SessionServerClient
from harness.samples.rollout import Rollout
from harness.samples.turn_rewards import TurnValue, value_turns
from harness.sessions.divergence import Divergence
from harness.sessions.inheritance import find_drift
from harness.sessions.record import RecordIds, session_record
from harness.suite.judge.groups import value_of
from harness.suite.judge.reward import score_session
from harness.suite.record.attached_sessions import read_attached_record
from harness.suite.record.config import RunConfig
from harness.suite.record.rollout_table import read_rollouts
from harness.suite.record.rundir import RunDirectory, check_same_engine, read_lock
from harness.suite.run.attached import AttachedChoice, attach
from harness.suite.run.services import EngineChoice, Services, serve_engine
from harness.suite.scenarios.plan import PlannedRollout, open_agent
from harness.tokens.matching import NormalForm, normal_form
from harness.types import Json, Sample
from harness.viewer.look import look_at
from harness.viewer.replay import copy_session, plan_again
from harness.viewer.run_view import end_words

STORE = "forks.db"
"""Sessions of the forks, in their folder."""
_ANSWER_S = 10.0


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
    run: Path,
    name: str,
    place: Path,
    variation: Variation,
    *,
    turn: int | None,
    count: int,
    say: Callable[[str], None],
    admin_token: str | None = None,
) -> list[Forks]:
    """Resample `turn` of the session `name` of `run` `count` times, with files in the folder `place`.

    Without `turn`, each trained turn, in order of admission. Raises `RunError` if the session lives, or if it, its
    prompt, its engine or its weights are not what they were, or has no such turn.
    """
    view = await asyncio.to_thread(look_at, run)
    line = view.find(name)
    planned = await asyncio.to_thread(plan_again, run, line)
    session_id = str(line.session_id)
    async with (
        _serve(run, planned, session_id, place / STORE, admin_token=admin_token, say=say) as (services, key, record),
        open_agent(planned.folder) as agent,
    ):
        turns = [each["turn"] for each in record["turns"] if each["masked_from"]] if turn is None else [turn]
        recorded = read_lock(RunDirectory(run).lock)["digests"].get(key, {})
        if variation.current_weights:
            recorded = {**recorded, "weights_digest": services.identity["weights_digest"]}
        check_same_engine(recorded, services.identity, "fork with that one; --weights current allows other weights")
        if not variation.current_weights:
            _require_same_weights(record, turns, await _live_versions(services))
        prompt = await asyncio.to_thread(planned.read_prompt)
        task = planned.task(agent, prompt, place, services.model)
        if variation.temperature is not None:
            sampling = {**task.session["sampling"], "temperature": variation.temperature}
            task = replace(task, session={**task.session, "sampling": sampling})
        form = normal_form(task.session_fields.get("matching", ()))
        async with services.open_manager() as manager:
            found = []
            for number in turns:
                here = replace(task, workdir=place / f"turn-{number}")
                rollouts = await manager.fork(session_id, here, turn=number, count=count, edits=variation.edits)
                refused = next((each for each in rollouts if each.session_id is None), None)
                if refused is not None:
                    raise RunError(f"turn {number} of {session_id}: {refused.outcome.detail}")
                forks = [
                    replace(await _score(planned, each), difference=_difference(record, number, each, variation, form))
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


@asynccontextmanager
async def _serve(
    run: Path,
    planned: PlannedRollout,
    session_id: str,
    store: Path,
    *,
    admin_token: str | None,
    say: Callable[[str], None],
) -> AsyncIterator[tuple[Services, str, Json]]:
    """Yield the services with the session in their store, their name in the lock, and the session's record."""
    directory = RunDirectory(run)
    server = RunConfig.load(directory.config).overrides.server
    if server is None:
        choice = EngineChoice.of(planned.folder)
        session = await copy_session(directory, session_id, store)
        async with serve_engine(choice, store, say) as services:
            yield services, choice.key, session_record(session, RecordIds.NONE)
        return
    record = await asyncio.to_thread(read_attached_record, directory.database, session_id)
    if record is None:
        raise RunError(f"expected a session with a record in {run}, got {session_id}; harness show lists them")
    on = AttachedChoice.of(planned.folder, server)
    async with attach(on, admin_token, store, say) as attached:
        yield attached, on.key, record


async def _live_versions(services: Services) -> set[str]:
    async with SessionServerClient(services.address) as server:
        return {worker.weight_version for worker in (await server.busiest(1, deadline_s=_ANSWER_S)).workers}


def _require_same_weights(record: Json, turns: Sequence[int], live: Set[str]) -> None:
    for turn in record["turns"]:
        sampled = {span["version"] for span in turn["weight_versions"][-1:]}
        if turn["turn"] in turns and sampled and sampled != live:
            raise RunError(
                f"turn {turn['turn']} was sampled by the weights {''.join(sampled)}, the engine serves"
                f" {', '.join(sorted(live))}; --weights current samples it with those"
            )


def _difference(record: Json, turn: int, fork: Rollout, variation: Variation, form: NormalForm) -> str | None:
    found = find_drift(record, turn, fork.session, variation.edits, form)
    if found is None:
        return None
    inherits = fork.session["inherits"]
    told = {**inherits, "difference": found.to_json()} if isinstance(found, Divergence) else inherits
    return (told and end_words(told)) or "its last call: it did not reach the turn"


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

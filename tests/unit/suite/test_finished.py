"""Samples of rollouts that have ended meet their next version too, and their records say so."""

import asyncio
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from harness.engines.scripted import ScriptStep
from harness.samples.codec import sample_to_json
from harness.suite.judge.verdicts import judge
from harness.suite.record.rollout_table import RolloutLog, RolloutRecord
from harness.suite.run.weight_schedule import FinishedSamples
from harness.suite.scenarios.scenario import Checks
from harness.types import Json, Sample
from tests.controllers.aborting import Stage, call, stage
from tests.recorded_runs import rollout_record

PATIENCE_S = 30


async def ask(base_url: str, **_: object) -> None:
    """One turn."""
    await call(base_url, [{"role": "user", "content": "go"}])


def record_of(number: int, samples: tuple[Sample, ...]) -> RolloutRecord:
    """A record with nothing but samples."""
    return rollout_record(number=number, samples=[sample_to_json(sample) for sample in samples])


async def update(staged: Stage, version: int, finished: FinishedSamples, directory: Path) -> None:
    """New weights, before which the queue is swept."""
    async with staged.manager.updating_weights(version, unconsumed=finished.samples) as running:
        await running.apply(directory)


async def test_what_is_swept_after_its_record_was_written_is_written_into_it(tmp_path: Path):
    """The last attempt of that rollout, and no other; what is swept before comes with the record."""
    with RolloutLog(tmp_path / "run.db") as log:
        async with stage(tmp_path, ScriptStep(text="One."), ScriptStep(text="Two.")) as staged:
            early, late = await staged.start(ask), await staged.start(ask)
            finished = FinishedSamples(staged.manager, log)
            log.append(record_of(0, early.samples))
            log.append(record_of(1, late.samples))
            finished.add(0, early.samples)
            log.append(record_of(0, finished.record(0)))
            finished.add(1, late.samples)
            for version in (1, 2):
                await update(staged, version, finished, tmp_path)
                finished.write()
            swept = finished.record(1)
            records = log.last_attempts()
        assert [sample_to_json(sample) for sample in early.samples] != list(records[0].samples)
        assert versions_of(records[0].samples) == {1}
        assert versions_of(records[1].samples) == {0}
        assert versions_of([sample_to_json(sample) for sample in swept]) == {1}
        log.append(record_of(1, swept))
        finished.write()
        assert versions_of(log.last_attempts()[1].samples) == {1}


def versions_of(samples: Iterable[Json]) -> set[int]:
    """The proximal versions of sampled tokens."""
    return {version for sample in samples for version in sample["proximal_versions"] if version >= 0}


async def test_a_rollout_that_is_handed_over_is_waited_for(tmp_path: Path):
    """One whose session is collected later is not: it has been swept with the others."""
    async with stage(tmp_path) as staged:
        manager = staged.manager
        finished = FinishedSamples(manager, RolloutLog(tmp_path / "run.db"))
        assert await finished.catch_up(deadline_s=PATIENCE_S) == 0
        manager.collecting.add("early")
        catching_up = asyncio.create_task(finished.catch_up(deadline_s=PATIENCE_S))
        await asyncio.sleep(0)
        manager.collecting.add("later")
        assert not catching_up.done()
        manager.collecting.discard("early")
        assert await catching_up == 0


async def test_a_rollout_that_is_never_handed_over_holds_up_no_update(tmp_path: Path):
    """It is waited for no longer than it may be, and counted."""
    async with stage(tmp_path) as staged:
        finished = FinishedSamples(staged.manager, RolloutLog(tmp_path / "run.db"))
        staged.manager.collecting.update({"lost", "lost too"})

        assert await finished.catch_up(deadline_s=0.01) == 2


async def test_a_manager_says_whose_sessions_it_is_collecting(tmp_path: Path):
    seen = []

    async def look(**_: object) -> None:
        seen.append(set(staged.manager.collecting))

    async with stage(tmp_path) as staged:
        await staged.start(look)
        assert seen == [set()]
        assert staged.manager.collecting == set()


@pytest.mark.parametrize(
    ("behavior", "proximal", "holds", "seen"),
    [
        ([0, -1, 1, 2], [1, -1, 2, 2], True, "100.0%, 2 of 2 tokens"),
        ([0, 0, 1, 2], [1, 0, 2, 2], False, "66.7%, 2 of 3 tokens"),
        ([0, 0], [0, 0], False, "0.0%, 0 of 0 tokens"),
    ],
)
def test_the_share_is_of_the_tokens_that_could_have_met_their_next_version(
    behavior: list[int], proximal: list[int], holds: bool, seen: str
):
    """Those of the newest version could not; where none could, nothing was shown."""
    sample = {"behavior_versions": behavior, "proximal_versions": proximal, "metadata": {}}
    record = msgspec.structs.replace(record_of(0, ()), samples=[sample])
    verdicts = judge(Checks(min_proximal_share=0.95), [record])
    [verdict] = [each for each in verdicts if each.check == "min_proximal_share"]

    assert (verdict.holds, verdict.seen) == (holds, seen)

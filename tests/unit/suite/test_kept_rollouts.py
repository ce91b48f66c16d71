"""A rollout that a run may have played before it was killed: it begins when it has to, and then anew."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.errors import StoreFull
from harness.rollouts.control.abort_report import Keep
from harness.server.store.base import MemoryStore
from harness.sessions.session import Session
from harness.suite.training.scenario_tasks import Workdirs
from harness.suite.training.training_pipeline import KeptRollouts
from harness.training.collector.groups import RolloutIndex, ScoredRollout
from harness.training.collector.record.step_table import StepTable
from tests.collector.staged_source import StagedSource
from tests.collector.training import playing
from tests.unit.collector.packed_steps import index_of, scored_rollout

PATIENCE_S = 30
INDEX = index_of(0, 0)


class SlowTable(StepTable):
    """Answers when the test wants it to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.is_asked = threading.Event()
        self.answers = threading.Event()

    def recall(self, index: RolloutIndex) -> ScoredRollout | None:
        self.is_asked.set()
        assert self.answers.wait(PATIENCE_S)
        return super().recall(index)


@pytest.fixture(name="table")
def _table(tmp_path: Path) -> Iterator[SlowTable]:
    with SlowTable(tmp_path / "run.db") as table:
        yield table


async def test_a_rollout_that_is_told_to_end_before_it_began_does_not_begin(table: SlowTable, tmp_path: Path):
    """It has no session, so it is cancelled, as the source would have done with it."""
    source = StagedSource()
    kept = KeptRollouts(source, table, tmp_path / "run.db", Workdirs(tmp_path / "sessions"))
    running = asyncio.create_task(kept.run(INDEX))
    assert await asyncio.to_thread(table.is_asked.wait, PATIENCE_S)
    ending = asyncio.create_task(kept.end({INDEX: running}, Keep.SAMPLES))
    await asyncio.sleep(0)
    table.answers.set()
    await asyncio.wait({running})
    await ending
    assert running.cancelled()
    assert not source.began


@pytest.mark.parametrize("resumes", [None, "the session of step 0"])
async def test_a_rollout_begins_anew_in_an_empty_directory(tmp_path: Path, resumes: str | None):
    """What a killed process had written there would be another prompt; one that continues finds what it had written."""
    workdirs, found = Workdirs(tmp_path / "sessions"), []
    half_done = workdirs.of(INDEX) / "half_done.txt"
    half_done.parent.mkdir(parents=True)
    half_done.touch()

    class Looking(StagedSource):
        async def run(self, index: RolloutIndex, resumes: str | None = None) -> ScoredRollout:
            found.append(half_done.exists())
            scored = scored_rollout(index)
            return replace(scored, rollout=replace(scored.rollout, session={**scored.rollout.session, "refusals": {}}))

    with StepTable(tmp_path / "run.db") as table:
        table.plan(0)
        kept = KeptRollouts(Looking(), table, tmp_path / "run.db", workdirs)
        await kept.run(INDEX, resumes)
    assert found == [resumes is not None]


class FullStore(MemoryStore):
    """There is no space left for a session."""

    async def create(self, session: Session) -> None:
        raise StoreFull("No space left on device: run.db")


async def test_a_full_disk_ends_the_step_also_where_no_session_could_be_made(tmp_path: Path):
    """Another attempt would wait for the same disk, and the step would fail for other words, minutes later."""
    with StepTable(tmp_path / "run.db") as table:
        table.plan(0)
        async with playing(tmp_path, store=FullStore()) as field:
            kept = KeptRollouts(field.source(), table, tmp_path / "run.db", Workdirs(tmp_path / "sessions"))
            with pytest.raises(StoreFull, match="free some space, then resume the run"):
                await kept.run(INDEX)

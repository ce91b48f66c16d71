"""A rollout that is told to end while the database is asked for it does not begin."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.collector.record.step_table import StepTable
from harness.collector.rollout_index import RolloutIndex, ScoredRollout
from harness.control.abort_report import Keep
from harness.suite.training.kept_rollouts import KeptRollouts
from tests.collector.staged_source import StagedSource
from tests.unit.collector.packed_steps import index_of

PATIENCE_S = 30
INDEX = index_of(0, 0)


class SlowTable(StepTable):
    """Answers when the test wants it to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.is_asked = threading.Event()
        self.answers = threading.Event()

    def recall(self, index: RolloutIndex) -> ScoredRollout | None:
        """See `StepTable`."""
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
    kept = KeptRollouts(source, table, tmp_path / "run.db")
    running = asyncio.create_task(kept.run(INDEX))
    assert await asyncio.to_thread(table.is_asked.wait, PATIENCE_S)
    ending = asyncio.create_task(kept.end({INDEX: running}, Keep.SAMPLES))
    await asyncio.sleep(0)
    table.answers.set()
    await asyncio.wait({running})
    await ending
    assert running.cancelled()
    assert not source.began

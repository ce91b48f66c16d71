"""Store scored rollouts before their step has them, so that a killed run does not replay them."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness.errors import StoreFull
from harness.machine.disk import disk_full
from harness.rollouts.control.abort_report import Keep
from harness.suite.training.workdirs import Workdirs
from harness.training.collector.groups import RolloutIndex, ScoredRollout
from harness.training.collector.record.step_table import StepTable
from harness.training.collector.rollout_source import RolloutSource


@dataclass(frozen=True, slots=True)
class KeptRollouts:
    """`RolloutSource` that wraps `source`."""

    source: RolloutSource
    table: StepTable
    database: Path
    workdirs: Workdirs
    _sought: set[RolloutIndex] = field(default_factory=set, init=False)  # not yet passed to the source

    async def run(self, index: RolloutIndex, resumes: str | None = None) -> ScoredRollout:
        """See `RolloutSource`. Raises `StoreFull` for a turn, `StoreError` for a rollout that could not be stored."""
        if resumes is None and (kept := await self._find(index)) is not None:
            return kept
        scored = await self.source.run(index, resumes)
        if scored.rollout.session["refusals"].get(StoreFull.code):  # the server would refuse every further rollout
            raise disk_full(self.database)
        if scored.reward is not None:
            await asyncio.to_thread(self.table.keep, scored)
        return scored

    async def end(self, running: Mapping[RolloutIndex, asyncio.Task[ScoredRollout]], keep: Keep) -> None:
        for index in running.keys() & self._sought:
            running[index].cancel()  # it has no session
        await self.source.end(running, keep)

    async def give_back(self, session_id: str) -> None:
        await self.source.give_back(session_id)

    async def _find(self, index: RolloutIndex) -> ScoredRollout | None:

        def find() -> ScoredRollout | None:
            kept = self.table.recall(index)
            if kept is None:
                self.workdirs.clear(index)
            return kept

        self._sought.add(index)
        try:
            return await asyncio.to_thread(find)
        finally:
            self._sought.remove(index)

"""Samples of rollouts that have ended, kept at hand while weights change: a trainer's queue of which nobody takes.

A session that is gone is swept by nobody. Its tokens meet their next version here: every update of the scenario scores
what waits in this queue, as it does for a trainer's, and a last sweep settles what waits for the weights that the
scenario ends with. Scores that come after the record of a rollout became durable are written into that record.

Between the moment when a session is collected and the one when its samples are here, neither the server nor the queue
has them as they will be. So whoever sweeps the server first waits for those who are in between, and sweeps the queue
then.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from harness.machine.deadlines import within
from harness.rollouts.manager import SessionManager
from harness.samples.codec import sample_to_json
from harness.suite.record.rollout_table import RolloutLog
from harness.types import Sample

_LOOK_EVERY_S = 0.02


@dataclass(slots=True)
class _Kept:
    """A sample of the queue, as its record has it."""

    number: int
    """Of its rollout."""
    recorded: Sample | None = None
    """None while there is no record."""


class FinishedSamples:
    """The queue of one scenario: its rollouts end under `manager` and have their records in `log`."""

    def __init__(self, manager: SessionManager, log: RolloutLog) -> None:
        self.samples: list[Sample] = []
        """The samples, which a sweep may replace one by one."""
        self._manager = manager
        self._log = log
        self._kept: list[_Kept] = []

    def add(self, number: int, samples: Sequence[Sample]) -> None:
        """Rollout `number` has ended with `samples`; has to follow without a wait when its manager hands it over."""
        self.samples += samples
        self._kept += [_Kept(number) for _ in samples]

    def record(self, number: int) -> tuple[Sample, ...]:
        """The samples of a rollout as they are now, which is how its record has them from now on."""
        return tuple(self._mark(number))

    async def catch_up(self, *, deadline_s: float) -> int:
        """Wait until every session that is being collected now has its samples here; how many have not in that time."""
        missing = set(self._manager.collecting)

        async def arrive() -> None:
            while missing & self._manager.collecting:  # noqa: ASYNC110  # a manager tells nobody, and a look costs nothing
                await asyncio.sleep(_LOOK_EVERY_S)

        await within(deadline_s, arrive())
        return len(missing & self._manager.collecting)

    def write(self) -> None:
        """Bring the records up to what was scored since they were written. Raises `StoreError`."""
        changed = {
            kept.number
            for kept, sample in zip(self._kept, self.samples, strict=True)
            if kept.recorded is not None and kept.recorded is not sample
        }
        for number in sorted(changed):
            self._log.amend(number, [sample_to_json(sample) for sample in self._mark(number)])

    def _mark(self, number: int) -> list[Sample]:
        found = []
        for kept, sample in zip(self._kept, self.samples, strict=True):
            if kept.number == number:
                kept.recorded = sample
                found.append(sample)
        return found

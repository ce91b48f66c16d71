"""Samples of finished rollouts, held while weights change, like a trainer's queue that is never consumed.

The server does not sweep deleted sessions. So each weight update scores the tokens that wait here, and a last sweep
scores those that wait for the final weights. `write` adds the scores to the records.
"""

import asyncio
from collections.abc import Sequence

from harness.machine.deadlines import within
from harness.rollouts.manager import SessionManager
from harness.samples.codec import sample_to_json
from harness.suite.record.rollout_table import RolloutLog
from harness.types import Sample

_LOOK_EVERY_S = 0.02


class FinishedSamples:
    """Queue of one scenario."""

    def __init__(self, manager: SessionManager, log: RolloutLog) -> None:
        self.samples: list[Sample] = []
        """Queued samples; a sweep may replace them one by one."""
        self._manager = manager
        self._log = log
        self._numbers: list[int] = []
        """Rollout of each sample."""
        self._recorded: list[Sample | None] = []
        """Samples as they were recorded; None before the record is written."""

    def add(self, number: int, samples: Sequence[Sample]) -> None:
        """Queue a rollout's samples. Do not await between the manager's return and this call."""
        self.samples += samples
        self._numbers += [number] * len(samples)
        self._recorded += [None] * len(samples)

    def record(self, number: int) -> tuple[Sample, ...]:
        """Return a rollout's samples for its record, and mark them recorded."""
        places = [place for place, each in enumerate(self._numbers) if each == number]
        for place in places:
            self._recorded[place] = self.samples[place]
        return tuple(self.samples[place] for place in places)

    async def catch_up(self, *, deadline_s: float) -> int:
        """Wait for sessions being collected. Returns how many are late."""
        # Meanwhile neither server nor queue has their final samples, so a sweep must wait for them.
        missing = set(self._manager.collecting)

        async def arrive() -> None:
            while missing & self._manager.collecting:  # noqa: ASYNC110  # the manager has no event
                await asyncio.sleep(_LOOK_EVERY_S)

        await within(deadline_s, arrive())
        return len(missing & self._manager.collecting)

    def write(self) -> None:
        """Update the records of samples scored since. Raises `StoreError`."""
        kept = zip(self._numbers, self._recorded, self.samples, strict=True)
        for number in sorted(
            {number for number, recorded, now in kept if recorded is not None and recorded is not now}
        ):
            self._log.amend(number, [sample_to_json(sample) for sample in self.record(number)])

"""Samples of finished rollouts, held while weights change, like a trainer's queue that is never consumed.

The server does not sweep deleted sessions. So each weight update scores the tokens that wait here, and a last sweep
scores those that wait for the final weights. `write` adds the scores to the records.
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
class _QueuedSample:
    number: int
    recorded: Sample | None = None
    """None before the record is written."""


class FinishedSamples:
    """Queue of one scenario."""

    def __init__(self, manager: SessionManager, log: RolloutLog) -> None:
        self.samples: list[Sample] = []
        """Queued samples; a sweep may replace them one by one."""
        self._manager = manager
        self._log = log
        self._kept: list[_QueuedSample] = []

    def add(self, number: int, samples: Sequence[Sample]) -> None:
        """Queue a rollout's samples. Do not await between the manager's return and this call."""
        self.samples += samples
        self._kept += [_QueuedSample(number) for _ in samples]

    def record(self, number: int) -> tuple[Sample, ...]:
        """Return a rollout's samples for its record, and mark them recorded."""
        return tuple(self._mark(number))

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

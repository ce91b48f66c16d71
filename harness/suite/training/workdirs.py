"""Agents' working directories in training: a folder per step, in it one per rollout."""

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness.machine.disk import make_way
from harness.training.collector.groups import GroupIndex, RolloutIndex


@dataclass(frozen=True, slots=True)
class Workdirs:
    """Working directories below `path`."""

    path: Path

    def of(self, index: RolloutIndex) -> Path:
        group = index.group
        return self.path / str(group.step) / f"{group.number}-{index.member}-{index.attempt}"

    def clear(self, index: RolloutIndex) -> None:
        """Remove what a killed process left."""
        make_way(self.of(index))

    def forget(self, before: int, carried: Collection[GroupIndex]) -> None:
        """Remove directories of groups begun before step `before`, except `carried` ones. Ignores errors."""
        for folder in self.path.glob("*"):
            if not folder.name.isdecimal() or int(folder.name) >= before:
                continue
            stay = {str(group.number) for group in carried if group.step == int(folder.name)}
            for workdir in folder.glob("*"):
                # Includes directories that a killed process left.
                if workdir.name.partition("-")[0] not in stay:
                    make_way(workdir)
            with suppress(OSError):  # not empty
                folder.rmdir()

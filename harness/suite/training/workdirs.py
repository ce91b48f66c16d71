"""The working directories of agents in training: a folder for each step that begins groups, in it one per rollout."""

import shutil
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness.collector.rollout_index import GroupIndex, RolloutIndex


@dataclass(frozen=True, slots=True)
class Workdirs:
    """The working directories in the folder `path`."""

    path: Path

    def of(self, index: RolloutIndex) -> Path:
        """That of the rollout at `index`."""
        group = index.group
        return self.path / str(group.step) / f"{group.number}-{index.member}-{index.attempt}"

    def clear(self, index: RolloutIndex) -> None:
        """Nothing is left of an earlier process that had begun the rollout at `index`, and was killed."""
        shutil.rmtree(self.of(index), ignore_errors=True)

    def forget(self, before: int, carried: Collection[GroupIndex]) -> None:
        """Remove those of groups that were begun before step `before`, unless they are `carried`: a later one has them.

        Those that a killed process had left are among them. What cannot be removed stays.
        """
        for folder in self.path.glob("*"):
            if not folder.name.isdecimal() or int(folder.name) >= before:
                continue
            stay = {str(group.number) for group in carried if group.step == int(folder.name)}
            for workdir in folder.glob("*"):
                if workdir.name.partition("-")[0] not in stay:
                    shutil.rmtree(workdir, ignore_errors=True)
            with suppress(OSError):  # some stay
                folder.rmdir()

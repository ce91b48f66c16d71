"""Index of turns by the version that sampled them (I7). A turn costs nothing while weights do not change (I11)."""

from collections import defaultdict
from collections.abc import Set

from harness.errors import UnknownWeightVersion
from harness.samples.proximal import waiting_tokens
from harness.samples.versions import version_of
from harness.types import Turn


class WaitingTurns:
    """Turn indices by policy version."""

    def __init__(self) -> None:
        self._by_version: defaultdict[int, set[int]] = defaultdict(set)

    def note(self, turn: Turn) -> None:
        for span in turn.version_spans:
            try:
                self._by_version[version_of(span)].add(turn.index)
            # Such labels wait for nothing.
            except UnknownWeightVersion:
                continue

    def forget_met(self, turn: Turn, version: int) -> None:
        """Remove `turn` unless a token waits for `version`."""
        if not waiting_tokens([turn], version):
            self._by_version[version - 1].discard(turn.index)

    def waiting_for(self, version: int) -> Set[int]:
        return self._by_version.get(version - 1, frozenset())

    @property
    def versions(self) -> list[int]:
        """Awaited policy versions."""
        return [version + 1 for version, turns in self._by_version.items() if turns]

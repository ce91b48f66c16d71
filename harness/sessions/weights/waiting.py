"""Which turns hold tokens that wait for their next policy version (I7).

An index, so that a turn costs nothing while no weights change (I11): turns are kept by the version that sampled tokens
of them, and looked at only when the version after it is live.
"""

from collections import defaultdict
from collections.abc import Set

from harness.errors import UnknownWeightVersion
from harness.samples.proximal import waiting_tokens
from harness.samples.versions import version_of
from harness.types import Turn


class WaitingTurns:
    """Indices of turns by the policy version that sampled tokens of them."""

    def __init__(self) -> None:
        self._by_version: defaultdict[int, set[int]] = defaultdict(set)

    def note(self, turn: Turn) -> None:
        """Take in a turn; labels that are no policy version wait for nothing."""
        for span in turn.version_spans:
            try:
                self._by_version[version_of(span)].add(turn.index)
            except UnknownWeightVersion:
                continue

    def forget_met(self, turn: Turn, version: int) -> None:
        """Forget `turn` when none of its tokens waits for `version` any more."""
        if not waiting_tokens([turn], version):
            self._by_version[version - 1].discard(turn.index)

    def waiting_for(self, version: int) -> Set[int]:
        """Turns that may have tokens that wait for `version`."""
        return self._by_version.get(version - 1, frozenset())

    @property
    def versions(self) -> list[int]:
        """The versions that some turn may wait for."""
        return [version + 1 for version, turns in self._by_version.items() if turns]

"""Policy versions: which weights sampled each token (I6).

A numeric weight label is its own version; any other gets the next version when first seen. Weights in the middle of an
update have no version: an error, never a guess.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harness.errors import UnknownWeightVersion
from harness.types import PromptLogprobs, Sample, Turn, VersionSpan

NOT_SAMPLED = -1
"""Version of a token that no policy sampled."""

LARGEST = 2**31 - 2
"""Last policy version; its successor fits into int32."""

_UNSETTLED = "updating-"

Versions = npt.NDArray[np.int32]
"""Shape [n]; may contain `NOT_SAMPLED`."""


def policy_version(label: str) -> int:
    """Return the version of a numeric label, or 0 for `default`, an engine's first. Raises `UnknownWeightVersion`."""
    if label == "default":
        return 0
    if not label.isdecimal() or len(label) > len(str(LARGEST)) or int(label) > LARGEST:
        raise UnknownWeightVersion(
            f"expected a weight version label that is a number up to {LARGEST}, the engine reported {label[:64]!r}"
        )
    return int(label)


class CountedVersions(NamedTuple):
    """Columns of a response, shape [n]."""

    behavior: Versions
    proximal: Versions


def count_versions(sample: Sample, version: int) -> CountedVersions:
    """Return the versions of `sample`, counted from `version` if it is unlabeled."""
    columns = CountedVersions(sample.behavior_versions, sample.proximal_versions)
    if not {"default"}.issuperset(sample.weight_versions):  # else the trainer names no versions
        return columns
    # A shift keeps I7: a token without a proximal value has its behavior version in both columns, others the next.
    return CountedVersions(*(np.where(each == NOT_SAMPLED, each, each + np.int32(version)) for each in columns))


def version_of(labeled: VersionSpan | PromptLogprobs) -> int:
    """Return the version of a span or scoring. Raises `UnknownWeightVersion`."""
    return policy_version(labeled.version) if labeled.number is None else labeled.number


class LabelOrder:
    """Policy version of each label, fixed once seen. An opaque label gets the version after the newest."""

    def __init__(self, numbers: Mapping[str, int] | None = None) -> None:
        self._numbers = dict(numbers or {})
        self._newest = max(self._numbers.values(), default=NOT_SAMPLED)

    def find(self, label: str) -> int | None:
        number = known_version(label)
        return self._numbers.get(label) if number is None else number

    def see(self, label: str) -> int:
        """Return the version of `label`, adding it if new. Raises `UnknownWeightVersion`."""
        number = self.find(label)
        if number is None:
            if not label or is_unsettled(label) or self._newest >= LARGEST:
                raise UnknownWeightVersion(f"the label {label[:64]!r} names no weight version")
            number = self._numbers[label] = self._newest + 1
        self._newest = max(self._newest, number)
        return number

    def forget(self, label: str) -> None:
        self._numbers.pop(label, None)


def require_settled(label: str) -> str:
    """Return `label`. Raises `UnknownWeightVersion` for unknown weights."""
    if not label or is_unsettled(label):
        raise UnknownWeightVersion(
            f"the engine sampled under the label {label[:64]!r}, which names no weights; none of it is used"
        )
    return label


def unsettled_label(label: str) -> str:
    """Return the label of an engine whose update to `label` is unfinished or aborted."""
    return _UNSETTLED + label


def is_unsettled(label: str) -> bool:
    return label.startswith(_UNSETTLED)


@lru_cache
def known_version(label: str) -> int | None:
    try:
        return policy_version(label)
    except UnknownWeightVersion:
        return None


def is_version(label: str, version: int) -> bool:
    return known_version(label) == version


def expand_spans(spans: Iterable[VersionSpan], size: int) -> Versions:
    """Return the version of each token. Raises `UnknownWeightVersion`."""
    versions = np.full(size, NOT_SAMPLED, dtype=np.int32)
    for span in spans:
        versions[span.start : span.end] = version_of(span)
    return versions


def updates_inside(turns: Iterable[Turn]) -> dict[str, int]:
    """Count weight updates during turns, by mode."""
    modes: Counter[str] = Counter()
    for turn in turns:
        # "abort" ended the request and a new one continued, so versions change where segments meet. "keep" froze it.
        joints = {segment.start for segment in turn.segments}
        modes.update("abort" if span.start in joints else "keep" for span in turn.version_spans[1:])
    return dict(modes)

"""Which policy version sampled each token (I6).

Engines label their weights with strings and report spans of output tokens; policies are counted. A label that is a
number says its place in that count itself; any other one has the place at which it was first seen. A label of weights
that are half-way through an update has none, and is an error, never a guess.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harness.errors import UnknownWeightVersion
from harness.types import PromptLogprobs, Sample, Turn, VersionSpan

NOT_SAMPLED = -1
"""Stands in a column of versions for a token that no policy sampled."""

LARGEST = 2**31 - 2
"""The last policy version: it fits into a column, and so does the one after it."""

_UNSETTLED = "updating-"

Versions = npt.NDArray[np.int32]
"""Policy versions, shape [n]; `NOT_SAMPLED` where no policy sampled the token."""


def policy_version(label: str) -> int:
    """The policy version that a label stands for by itself; an engine's initial label `default` is version 0.

    Raises `UnknownWeightVersion` for one that does not say it: such a label has its place in a `LabelOrder`.
    """
    if label == "default":
        return 0
    if not label.isdecimal() or len(label) > len(str(LARGEST)) or int(label) > LARGEST:
        raise UnknownWeightVersion(
            f"expected a weight version label that is a number up to {LARGEST}, the engine reported {label[:64]!r}"
        )
    return int(label)


def is_unlabeled(labels: Iterable[str]) -> bool:
    """Whether these are labels of an engine whose trainer names no versions: it keeps the one it began with."""
    return {"default"}.issuperset(labels)


class CountedVersions(NamedTuple):
    """Columns of a sample's response, shape [n]; `NOT_SAMPLED` where no policy sampled the token."""

    behavior: Versions
    proximal: Versions


def count_versions(sample: Sample, version: int) -> CountedVersions:
    """The versions of `sample`; where its labels say nothing, both are counted from `version`, the trainer's own.

    So a token without a proximal value has its behavior version in both columns, and one with it the next (I7).
    """
    columns = CountedVersions(sample.behavior_versions, sample.proximal_versions)
    if not is_unlabeled(sample.weight_versions):
        return columns
    return CountedVersions(*(np.where(each == NOT_SAMPLED, each, each + np.int32(version)) for each in columns))


def version_of(labeled: VersionSpan | PromptLogprobs) -> int:
    """The policy version that sampled or scored. Raises `UnknownWeightVersion`."""
    return policy_version(labeled.version) if labeled.number is None else labeled.number


class LabelOrder:
    """Which policy version each label stands for, on every worker alike.

    A number up to `LARGEST` stands for itself, `default` for 0. Any other label is opaque: its version is the one after
    the newest that had been seen when it was seen first. The same label never means another version.
    """

    def __init__(self, numbers: Mapping[str, int] | None = None) -> None:
        self._numbers = dict(numbers or {})
        self._newest = max(self._numbers.values(), default=NOT_SAMPLED)

    def find(self, label: str) -> int | None:
        """The version of `label`; None for one that has not been seen, or stands for none."""
        number = known_version(label)
        return self._numbers.get(label) if number is None else number

    def see(self, label: str) -> int:
        """The version of `label`, which has a place from now on. Raises `UnknownWeightVersion` when it can have none.

        That is a label of weights that nobody knows, or one version more than a column can hold.
        """
        number = self.find(label)
        if number is None:
            if not label or is_unsettled(label) or self._newest >= LARGEST:
                raise UnknownWeightVersion(f"the label {label[:64]!r} stands for no weight version")
            number = self._numbers[label] = self._newest + 1
        self._newest = max(self._newest, number)
        return number

    def forget(self, label: str) -> None:
        """Take an opaque label out again."""
        self._numbers.pop(label, None)


def require_settled(label: str) -> str:
    """`label`, which may be anything but what weights have that nobody knows. Raises `UnknownWeightVersion`."""
    if not label or is_unsettled(label):
        raise UnknownWeightVersion(
            f"the engine sampled under the label {label[:64]!r}, which stands for no weights; nothing of it is used"
        )
    return label


def unsettled_label(label: str) -> str:
    """The label of an engine while its weights change to those of `label`: it stands for no version.

    Its samples meanwhile, and for good when the update breaks off, are nobody's.
    """
    return _UNSETTLED + label


def is_unsettled(label: str) -> bool:
    """Whether `label` says that weights are half-way through an update."""
    return label.startswith(_UNSETTLED)


def known_version(label: str) -> int | None:
    """The policy version `label` stands for; None when it stands for none."""
    try:
        return policy_version(label)
    except UnknownWeightVersion:
        return None


def is_version(label: str, version: int) -> bool:
    """Whether `label` stands for the policy version `version`; one that stands for none does not."""
    return known_version(label) == version


def expand_spans(spans: Iterable[VersionSpan], size: int) -> Versions:
    """The policy version of each of `size` output tokens. Raises `UnknownWeightVersion`."""
    versions = np.full(size, NOT_SAMPLED, dtype=np.int32)
    for span in spans:
        versions[span.start : span.end] = version_of(span)
    return versions


def updates_inside(turns: Iterable[Turn]) -> dict[str, int]:
    """How many weight updates fell into a turn, by what they did to its generation.

    `abort`: it ended and a new request went on, so the versions change where two segments meet. `keep`: it was frozen,
    so one request has both versions.
    """
    modes: Counter[str] = Counter()
    for turn in turns:
        joints = {segment.start for segment in turn.segments}
        modes.update("abort" if span.start in joints else "keep" for span in turn.version_spans[1:])
    return dict(modes)

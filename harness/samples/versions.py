"""Which policy version sampled each token (I6).

Engines label their weights with strings and report spans of output tokens; policies are counted. A label that is not a
number has no place in that count and is an error, never a guess.
"""

from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from harness.errors import UnknownWeightVersion
from harness.types import Turn, VersionSpan

NOT_SAMPLED = -1
"""Stands in a column of versions for a token that no policy sampled."""

_UNSETTLED = "updating-"

Versions = npt.NDArray[np.int32]
"""Policy versions, shape [n]; `NOT_SAMPLED` where no policy sampled the token."""


def policy_version(label: str) -> int:
    """The integer policy version a label stands for; an engine's initial label `default` is version 0.

    Raises `UnknownWeightVersion`.
    """
    if label == "default":
        return 0
    if not label.isdecimal():
        raise UnknownWeightVersion(f"expected a weight version label that is a number, the engine reported {label!r}")
    return int(label)


def unsettled_label(label: str) -> str:
    """What an engine is labeled while its weights change to those of `label`: a label that stands for no version.

    Whatever it samples meanwhile, and for good when the update breaks off, is nobody's.
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
        versions[span.start : span.end] = policy_version(span.version)
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

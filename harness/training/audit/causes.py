"""Causes of the gap between the logprob that an engine reported for a token and a reference's. Pure.

The reference begins as the trainer sees a token: current weights in float32, its own template, every id a candidate.
Each cause makes it follow the engine in one respect. A cause is needed if the gap grows as soon as the reference
follows the engine in all needed ones but this. Its share is its Shapley value (1953): the mean change of the gap over
all orders of the needed causes. So the shares and what stays unexplained add up to the gap.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import combinations
from math import factorial
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt


class GapCause(StrEnum):
    """Respect in which engine and trainer differ."""

    VERSION = "version"
    """Other weights than the trainer's current ones sampled the token."""
    CACHE = "cache"
    """Keys and values of older weights stood in the engine's cache."""
    TEMPLATE = "template"
    """The trainer's chat template renders the first prompt differently."""
    EXPERTS = "experts"
    """The engine chose other experts."""
    DTYPE = "dtype"
    """The engine computes in bfloat16."""
    MASK = "mask"
    """The engine's logprob is over its candidates."""
    SCALE = "scale"
    """The engine's logprob is after a temperature."""
    WORKER = "worker"
    """One worker's tokens stay unexplained, other workers' do not."""
    BATCH = "batch"
    """Alone in a request, the engine finds another logprob: batches and chunks change it."""
    ENGINE = "engine"
    """No probe explains the rest."""


_OF_REST = (GapCause.BATCH, GapCause.WORKER, GapCause.ENGINE)
PROBED = tuple(cause for cause in GapCause if cause not in _OF_REST)
"""Causes that a reference can follow, in the order of `GapCause`."""

Gaps = Callable[[frozenset[GapCause]], npt.NDArray[np.float32]]
"""From the causes that the reference follows to the gap of each token: the engine's logprob less the reference's."""

_SMALL = 20  # part of the gap that the rest's causes need
FLOOR = 1e-4
"""Mean gap in nats that needs no name: float32 engines differ by less."""
_WORSE = 1.2  # a needed cause shrinks the gap at least this much, with all others followed
_WORSE_ROUNDED = 1.02
_ROUNDED = 1.5  # times the size of bfloat16's rounding
_OUTLIER = 3.0  # times the gap that the best worker keeps
_ALONE = 1.5  # times the gap that stays when the engine scores alone
_DRAWS = 400


class Share(NamedTuple):
    """Share of one cause in the mean absolute gap, in nats, with its 95 % interval over branches."""

    cause: GapCause
    nats: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Attribution:
    gap: float
    left: npt.NDArray[np.float32]
    """Absolute gap of each token that stays once the reference follows the engine in the needed causes."""
    shares: Sequence[Share]
    """Largest first; they add up to `gap`. Includes `WORKER` and `ENGINE`."""
    causes: Mapping[str, frozenset[GapCause]]

    @property
    def named(self) -> list[Share]:
        """Return the shares above the floor; what no probe explains, above a twentieth of the gap too."""
        least = dict.fromkeys(_OF_REST, self.gap / _SMALL)
        return [share for share in self.shares if share.nats >= max(FLOOR, least.get(share.cause, 0.0))]

    @classmethod
    def of(
        cls,
        gaps: Gaps,
        candidates: frozenset[GapCause],
        workers: npt.NDArray[np.str_],
        branches: npt.NDArray[np.int32],
        *,
        moved: npt.NDArray[np.float32],
        behind: npt.NDArray[np.bool_],
    ) -> Self:
        """Attribute the gaps of tokens, each sampled by a worker in a branch, to `candidates`.

        `moved` is the engine's logprob minus its score of the token alone, NaN where it has none. `behind`
        is True for tokens after tokens of older weights.
        """
        sizes = cache(lambda causes: np.abs(gaps(causes)))
        needed, usual = _find_by_worker(sizes, candidates, workers)
        parts = {cause: np.zeros(len(workers), np.float32) for cause in GapCause}
        left = np.zeros(len(workers), np.float32)
        for name, causes in needed.items():
            own = workers == name
            left[own] = sizes(causes)[own]
            for cause in causes:
                parts[cause][own] = _shapley(sizes, cause, causes)[own]
            rest = left * own
            is_batch = _share_gone(gaps, causes, own & ~behind, moved) > 0
            # Without batch effects, what is gone with the cache is its fault, if older weights filled it.
            for cause, group in ((GapCause.BATCH, ~behind), (GapCause.BATCH if is_batch else GapCause.CACHE, behind)):
                gone = rest * group * _share_gone(gaps, causes, own & group, moved)
                if cause is GapCause.CACHE and _mean(gone, own) < _mean(sizes(frozenset()), own) / _SMALL:
                    continue  # rounding differs as much
                parts[cause] += gone
                rest -= gone
            mean = _mean(rest, own)
            odd = mean - usual if mean > max(_OUTLIER * usual, FLOOR) else 0.0
            rounded = min(mean - odd, _rounding(gaps, causes, own)) if mean - odd > FLOOR else 0.0
            of_rest = {GapCause.WORKER: odd, GapCause.DTYPE: rounded, GapCause.ENGINE: mean - odd - rounded}
            for cause, nats in of_rest.items():
                parts[cause] += rest * np.float32(nats / max(mean, 1e-12))
        shares = [_share(cause, part, branches) for cause, part in parts.items() if part.any()]
        shares.sort(key=lambda share: -share.nats)
        return cls(float(sizes(frozenset()).mean()), left, shares, needed)


def _find_by_worker(
    sizes: Gaps, candidates: frozenset[GapCause], workers: npt.NDArray[np.str_]
) -> tuple[dict[str, frozenset[GapCause]], float]:
    """Return the needed causes of each worker, and the mean gap that the best one keeps."""
    own = {str(name): workers == name for name in np.unique(workers)}
    needed = {name: find_needed(sizes, candidates, mask) for name, mask in own.items()}
    kept = {name: _mean(sizes(causes), own[name]) for name, causes in needed.items()}
    usual = min(kept.values())
    outliers = {name for name, gap in kept.items() if gap > max(_OUTLIER * usual, FLOOR)}
    # What fits a worker with unknown weights is chance, and a few tokens tell less than all: take what all others need,
    # unless a worker's own causes explain more.
    common = find_needed(sizes, candidates, ~np.isin(workers, [*outliers]))
    for name, mask in own.items():
        if name in outliers or kept[name] * _WORSE > _mean(sizes(common), mask):
            needed[name] = common
    return needed, usual


def find_needed(sizes: Gaps, candidates: frozenset[GapCause], own: npt.NDArray[np.bool_]) -> frozenset[GapCause]:
    """Return the causes without which the gaps grow, on the tokens of the mask `own`."""
    needed = candidates
    while True:
        now = _mean(sizes(needed), own)
        without = {cause: _mean(sizes(needed - {cause}), own) for cause in PROBED if cause in needed}
        idle = [cause for cause, gap in without.items() if gap <= max(_worse(cause) * now, now + FLOOR / 10)]
        if not idle:
            return needed
        needed -= {min(idle, key=without.__getitem__)}


def _worse(cause: GapCause) -> float:
    # Another implementation in bfloat16 rounds differently, so that following it shrinks the gap little.
    return _WORSE_ROUNDED if cause is GapCause.DTYPE else _WORSE


def _rounding(gaps: Gaps, causes: frozenset[GapCause], own: npt.NDArray[np.bool_]) -> float:
    """Return how much of the rest bfloat16 explains: two right implementations differ by about as much as from float32.

    Nothing of a larger rest, unless following the engine in bfloat16 has shrunk it.
    """
    precise, rounded = gaps(causes - {GapCause.DTYPE}), gaps(causes | {GapCause.DTYPE})
    size = _mean(np.abs(precise - rounded), own)
    is_plausible = GapCause.DTYPE in causes or _mean(np.abs(precise), own) <= _ROUNDED * size
    return _ROUNDED * size if is_plausible else 0.0


def _share_gone(
    gaps: Gaps, causes: frozenset[GapCause], own: npt.NDArray[np.bool_], moved: npt.NDArray[np.float32]
) -> float:
    """Return the share of the rest that is gone when the engine scores tokens alone; 0 if it did not."""
    own = own & ~np.isnan(moved)
    if not own.any():
        return 0.0
    # A request for scores has no candidates and no temperature, and recomputes its prefix.
    same = causes - {GapCause.CACHE, GapCause.MASK, GapCause.SCALE}
    rest, alone = _mean(np.abs(gaps(causes)), own), _mean(np.abs(gaps(same) - moved), own)
    return 1 - alone / rest if rest > _ALONE * alone + FLOOR else 0.0


def _shapley(sizes: Gaps, cause: GapCause, causes: frozenset[GapCause]) -> npt.NDArray[np.float32]:
    """Return the mean change of each token's gap by `cause` over all orders of `causes`."""
    others = sorted(causes - {cause})
    change = np.zeros_like(sizes(causes))
    for size in range(len(others) + 1):
        weight = factorial(size) * factorial(len(others) - size) / factorial(len(causes))
        for before in map(frozenset, combinations(others, size)):
            change += weight * (sizes(before) - sizes(before | {cause}))
    return change


def _share(cause: GapCause, part: npt.NDArray[np.float32], branches: npt.NDArray[np.int32]) -> Share:
    # Tokens of one branch share its faults, so draw branches, not tokens.
    count = int(branches.max()) + 1
    sums, sizes = np.bincount(branches, part, count), np.bincount(branches, minlength=count)
    drawn = np.random.default_rng(0).integers(0, count, (_DRAWS, count))
    means = sums[drawn].sum(axis=1) / np.maximum(sizes[drawn].sum(axis=1), 1)
    low, high = np.quantile(means, (0.025, 0.975))
    return Share(cause, float(part.mean()), float(low), float(high))


def _mean(gaps: npt.NDArray[np.float32], own: npt.NDArray[np.bool_]) -> float:
    return float(gaps[own].mean())

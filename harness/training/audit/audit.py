"""Audit: why the logprobs that an engine reported differ from those of the trainer's weights, cause by cause."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.errors import RunError
from harness.training.audit.branches import AuditedBranch
from harness.training.audit.causes import FLOOR, Attribution, GapCause, Share
from harness.training.audit.reference import TEMPERATURES, Reference
from harness.types import Json

NEXT_STEPS: Mapping[GapCause, str] = {
    GapCause.VERSION: "tokens are older than the trainer's weights: lower `limits.staleness`, or weight by importance",
    GapCause.CACHE: "the engine read a cache of older weights: flush it at updates",
    GapCause.TEMPLATE: "the trainer's chat template is another one: train the recorded token ids",
    GapCause.EXPERTS: "the engine chose other experts: record and replay them (docs/replay.md)",
    GapCause.DTYPE: "the engine computes in bfloat16: serve and train in one dtype, or weight by importance",
    GapCause.MASK: "the engine left candidates out: record its masks (docs/replay.md), or sample from all ids",
    GapCause.SCALE: "the engine reports logprobs after a temperature: sample at 1, or have it report raw ones",
    GapCause.WORKER: "one worker differs from the others: load its weights again",
    GapCause.ENGINE: "no probe explains it: compare the engine with `harness doctor`",
}
_BUCKETS = 10
_MOST_LOGITS = 1 << 27  # of a branch at once: half a gigabyte
_Column = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class AuditReport:
    tokens: int
    branches: int
    attribution: Attribution
    left_out: Mapping[str, int]
    factors: Mapping[str, float]
    """Temperature that explains a worker's logprobs, by worker."""
    groups: Mapping[str, Sequence[Json]]
    """`position`, `turn`, `version` and `worker`: tokens, mean gap and what stays of it, by value."""

    @property
    def verdicts(self) -> list[str]:
        """Return a sentence for each named cause, with the next step."""
        gap = self.attribution.gap
        if gap < FLOOR:
            return [f"no cause: the mean gap is {gap:.2g} nats, as rounding leaves it"]
        return [
            f"{self._where(each)}{each.nats:.3g} of {gap:.3g} nats: {NEXT_STEPS[each.cause]}"
            for each in self.attribution.named
        ]

    def _where(self, share: Share) -> str:
        """Return the cause, with the workers that have it if others do not, and the temperature."""
        causes = self.attribution.causes
        having = [worker for worker, found in causes.items() if share.cause in found]
        if share.cause is GapCause.WORKER:
            having = [max(self.groups["worker"], key=lambda row: float(row["left"]))["value"]]
        where = f"{share.cause}"
        if share.cause is GapCause.SCALE:
            where += f" (temperature {', '.join(sorted({f'{self.factors[worker]:g}' for worker in having}))})"
        return f"{where}, worker {', '.join(having)}: " if 0 < len(having) < len(causes) else f"{where}: "

    def to_json(self) -> Json:
        return {
            "tokens": self.tokens,
            "branches": self.branches,
            **self.attribution.to_json(),
            "named": [share.cause for share in self.attribution.named],
            "verdicts": self.verdicts,
            "left_out": dict(self.left_out),
            "groups": {name: list(rows) for name, rows in self.groups.items()},
        }


class _Probes:
    """Passes over all branches, each made once."""

    def __init__(self, branches: Sequence[AuditedBranch], reference: Reference) -> None:
        self._branches = branches
        self._reference = reference
        self._behavior = np.concatenate([branch.logprobs for branch in branches])
        self.workers = np.concatenate([branch.workers for branch in branches])
        self._names = [str(name) for name in np.unique(self.workers)]
        asked = {params.temperature for branch in branches for params in branch.params if params.temperature}
        self._factors = sorted({*TEMPERATURES, *asked})
        self._read: dict[frozenset[GapCause], npt.NDArray[np.float32]] = {}

    def gaps(self, causes: frozenset[GapCause]) -> npt.NDArray[np.float32]:
        """Return the gap of each token; with `SCALE`, at the temperature that fits its worker best."""
        found = self._probe(causes)
        own: npt.NDArray[np.float32] = found[self._factors.index(1.0)].copy()
        for name, factor in self.temperatures(causes).items() if GapCause.SCALE in causes else ():
            own[self.workers == name] = found[self._factors.index(factor), self.workers == name]
        return own

    def temperatures(self, causes: frozenset[GapCause]) -> dict[str, float]:
        """Return the temperature that leaves each worker the smallest gap."""
        sizes = np.abs(self._probe(causes))
        return {name: self._factors[sizes[:, self.workers == name].mean(axis=1).argmin()] for name in self._names}

    def _probe(self, causes: frozenset[GapCause]) -> npt.NDArray[np.float32]:
        """Return the gaps [temperatures, tokens]."""
        passes = causes - {GapCause.MASK, GapCause.SCALE}
        if passes not in self._read:
            read = [self._reference.read(branch, passes, self._factors) for branch in self._branches]
            self._read[passes] = np.concatenate(read, axis=2)
        gaps: npt.NDArray[np.float32] = self._behavior - self._read[passes][int(GapCause.MASK in causes)]
        return gaps


def audit(branches: Iterable[AuditedBranch], reference: Reference) -> AuditReport:
    """Audit `branches`. Blocks for some forward passes of each.

    Raises `RunError` without a token whose weights are known, `ModelError`.
    """
    found = list(branches)
    kept = [each for each in found if {step.version for step in each.recorded.passes} <= reference.weights.keys()]
    if not kept:
        raise RunError(
            f"expected sampled tokens of the versions {sorted(reference.weights)}, whose weights are known, got"
            f" {len(found)} branches of others; name their folders with --weights VERSION=FOLDER"
        )
    left_out = {"branches of versions whose weights are not known": len(found) - len(kept)}
    _require_vocabulary(kept, reference)
    most = max(1, _MOST_LOGITS // reference.vocab_size)
    left_out["tokens behind the first ones of long branches"] = sum(max(0, b.logprobs.size - most) for b in kept)
    kept = [branch.first(most) for branch in kept]
    probes = _Probes(kept, reference)
    sizes = [branch.logprobs.size for branch in kept]
    of_branch = np.repeat(np.arange(len(kept), dtype=np.int32), sizes)
    attribution = Attribution.of(probes.gaps, _candidates(kept, reference), probes.workers, of_branch)
    position = np.concatenate([branch.recorded.positions for branch in kept])
    width = -(-int(position.max() + 1) // _BUCKETS)
    columns: dict[str, _Column] = {
        "position": position // width * width,
        "turn": np.concatenate([branch.turns for branch in kept]),
        "version": np.concatenate([branch.versions for branch in kept]),
        "worker": probes.workers,
    }
    total = np.abs(probes.gaps(frozenset()))
    scaled = {name: causes for name, causes in attribution.causes.items() if GapCause.SCALE in causes}
    return AuditReport(
        sum(sizes),
        len(kept),
        attribution,
        {reason: count for reason, count in left_out.items() if count},
        {name: probes.temperatures(causes)[name] for name, causes in scaled.items()},
        {name: _group(column, total, attribution.left) for name, column in columns.items()},
    )


def _require_vocabulary(branches: Sequence[AuditedBranch], reference: Reference) -> None:
    largest = max(int(side.ids.max()) for branch in branches for side in (branch.recorded, branch.rendered))
    if largest >= reference.vocab_size:
        raise RunError(
            f"expected weights of the model that sampled, got {reference.weights[reference.trainer]} with"
            f" {reference.vocab_size} token ids, and the record has the id {largest}"
        )


def _candidates(branches: Sequence[AuditedBranch], reference: Reference) -> frozenset[GapCause]:
    is_possible = {
        GapCause.VERSION: any((branch.versions != reference.trainer).any() for branch in branches),
        GapCause.CACHE: any(len({step.version for step in branch.recorded.passes}) > 1 for branch in branches),
        GapCause.TEMPLATE: any(not np.array_equal(each.recorded.ids, each.rendered.ids) for each in branches),
        GapCause.EXPERTS: reference.has_routers and any(each.recorded.rows is not None for each in branches),
        GapCause.MASK: any(
            branch.masks is not None or any(p.filters_tokens for p in branch.params) for branch in branches
        ),
        GapCause.DTYPE: True,
        GapCause.SCALE: True,
    }
    return frozenset(cause for cause, possible in is_possible.items() if possible)


def _group(column: _Column, gaps: _Column, left: _Column) -> list[Json]:
    found = []
    for value in np.unique(column):
        own = column == value
        means = {"gap": float(gaps[own].mean()), "left": float(left[own].mean())}
        found.append({"value": value.item(), "tokens": int(own.sum()), **means})
    return found

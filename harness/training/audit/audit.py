"""Audit: why the logprobs that an engine reported differ from the trainer's weights', cause by cause."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.errors import ModelError, RunError
from harness.training.audit.branches import AuditedBranch, ReadBranch
from harness.training.audit.causes import FLOOR, Attribution, GapCause, Share
from harness.training.audit.reference import Reference
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
    GapCause.BATCH: "alone, the engine finds other logprobs: make it batch invariant, or weight by importance",
    GapCause.ENGINE: "no probe explains it: compare the engine with `harness doctor`",
}
_UNKNOWN = "branches of versions whose weights are not known"
_UNSCORED = "no engine scored the tokens again"
_BUCKETS = 10
_MOST_LOGITS = 1 << 27  # of a branch at once: half a gigabyte
_Column = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class AuditReport:
    tokens: int
    branches: int
    attribution: Attribution
    left_out: Mapping[str, int]
    not_probed: Mapping[GapCause, str]
    """Causes that stay hidden in the share of `ENGINE`, with the reason."""
    factors: Mapping[str, float]
    """Temperature that explains a worker's logprobs, by worker."""
    groups: Mapping[str, Sequence[Json]]
    """`position`, `turn`, `version` and `worker`: tokens, mean gap and what stays of it, by value."""
    sessions: Mapping[str, float]
    """Mean gap of each session."""

    @property
    def verdicts(self) -> list[str]:
        """Return a sentence for each named cause, with the next step."""
        gap = self.attribution.gap
        if gap < FLOOR:
            return [f"no cause: the mean gap is {gap:.2g} nats, as rounding leaves it"]
        return [
            f"{self._where(each)}{each.nats:.3g} of {gap:.3g} nats: {self._next_step(each.cause)}"
            for each in self.attribution.named
        ]

    def _next_step(self, cause: GapCause) -> str:
        hidden = ", ".join(self.not_probed) if cause is GapCause.ENGINE else ""
        return f"{NEXT_STEPS[cause]}; not probed: {hidden}" if hidden else NEXT_STEPS[cause]

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
        found = self.attribution
        return {
            "tokens": self.tokens,
            "branches": self.branches,
            "gap": found.gap,
            "shares": [share._asdict() for share in found.shares],
            "causes": {worker: sorted(causes) for worker, causes in found.causes.items()},
            "named": [share.cause for share in found.named],
            "not_probed": dict(self.not_probed),
            "verdicts": self.verdicts,
            "left_out": dict(self.left_out),
            "groups": {name: list(rows) for name, rows in self.groups.items()},
            "sessions": dict(self.sessions),
        }


class Audit:
    """Branches compared with a reference, one after the other."""

    def __init__(self, reference: Reference, most: int | None = None) -> None:
        """Report the last `most` branches, or all."""
        self.reference = reference
        self.read: deque[ReadBranch] = deque(maxlen=most)
        self.left_out: Counter[str] = Counter()

    def apart(self) -> "Audit":
        return Audit(self.reference)

    def add(self, branch: AuditedBranch) -> None:
        """Read `branch`, or leave it out if weights that sampled it are gone. Raises `RunError`, `ModelError`."""
        reference = self.reference
        if not reference.knows(branch.passed_versions):
            self.left_out[_UNKNOWN] += 1
            return
        sides = [branch.recorded] + ([] if branch.rendered is None else [branch.rendered])
        if (largest := max(int(side.ids.max()) for side in sides)) >= reference.vocab_size:
            raise RunError(
                f"expected weights of the model that sampled, got {reference.weights[reference.trainer]} with"
                f" {reference.vocab_size} token ids, and the record has the id {largest}"
            )
        most = max(1, _MOST_LOGITS // reference.vocab_size)
        try:
            self.read.append(reference.read(branch.first(most)))
        except ModelError:
            if reference.knows(branch.passed_versions):
                raise
            self.left_out[_UNKNOWN] += 1  # training has removed them meanwhile
            return
        self.left_out["tokens behind the first ones of long branches"] += max(0, branch.logprobs.size - most)

    def join(self, other: "Audit") -> None:
        self.read.extend(other.read)
        self.left_out.update(other.left_out)

    def report(self) -> AuditReport:
        """Attribute the gaps. Raises `RunError` without a token whose weights are known."""
        if not self.read:
            found = self.left_out.total()
            raise RunError(
                f"expected sampled tokens of the versions {sorted(self.reference.weights)}, whose weights are known,"
                + (f" got {found} branches of others; name their folders with --weights VERSION=FOLDER" * bool(found))
                + (" got none: no rollout has one yet" * (not found))
            )
        branches = [each.branch for each in self.read]
        sizes = [branch.logprobs.size for branch in branches]
        of_branch = np.repeat(np.arange(len(branches), dtype=np.int32), sizes)
        probes = _Probes([*self.read], has_routers=self.reference.has_routers)
        attribution = Attribution.of(
            *(probes.gaps, probes.candidates, probes.workers, of_branch),
            moved=probes.moved,
            behind=np.concatenate([branch.versions > branch.passed_versions[0] for branch in branches]),
        )
        position = np.concatenate([branch.recorded.positions for branch in branches])
        width = -(-int(position.max() + 1) // _BUCKETS)
        columns: dict[str, _Column] = {
            "position": position // width * width,
            "turn": np.concatenate([branch.turns for branch in branches]),
            "version": np.concatenate([branch.versions for branch in branches]),
            "worker": probes.workers,
        }
        sessions = np.repeat([branch.session_id for branch in branches], sizes)
        total = np.abs(probes.gaps(frozenset()))
        scaled = {name: causes for name, causes in attribution.causes.items() if GapCause.SCALE in causes}
        return AuditReport(
            sum(sizes),
            len(branches),
            attribution,
            {reason: count for reason, count in self.left_out.items() if count},
            probes.not_probed,
            {name: probes.temperatures(causes)[name] for name, causes in scaled.items()},
            {name: _group(column, total, attribution.left) for name, column in columns.items()},
            {str(each): float(total[sessions == each].mean()) for each in np.unique(sessions)},
        )


class _Probes:
    """Readings of all branches."""

    def __init__(self, read: Sequence[ReadBranch], *, has_routers: bool) -> None:
        branches = [each.branch for each in read]
        self._read = read
        self._behavior = np.concatenate([branch.logprobs for branch in branches])
        self.workers = np.concatenate([branch.workers for branch in branches])
        self.moved = self._behavior - np.concatenate([branch.again for branch in branches])
        """Behavior logprob minus a second score; NaN where the engine gave none."""
        self._names = [str(name) for name in np.unique(self.workers)]
        self._factors = sorted(set(read[0].factors).intersection(*(each.factors for each in read)))
        is_masked = any(b.masks is not None or any(p.filters_tokens for p in b.params) for b in branches)
        possible = frozenset[GapCause]().union(*(each.possible for each in read))
        self.candidates = possible | {GapCause.SCALE} | ({GapCause.MASK} if is_masked else set())
        is_missing = {
            GapCause.BATCH: np.isnan(self.moved).all() and _UNSCORED,
            GapCause.TEMPLATE: all(branch.rendered is None for branch in branches) and "no chat template is known",
            GapCause.EXPERTS: has_routers
            and all(branch.recorded.rows is None for branch in branches)
            and "no experts were recorded",
        }
        self.not_probed = {cause: str(reason) for cause, reason in is_missing.items() if reason}

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
        gaps: npt.NDArray[np.float32] = self._behavior - np.concatenate(
            [each.logprobs(causes, self._factors) for each in self._read], axis=1
        )
        return gaps


def _group(column: _Column, gaps: _Column, left: _Column) -> list[Json]:
    found = []
    for value in np.unique(column):
        own = column == value
        means = {"gap": float(gaps[own].mean()), "left": float(left[own].mean())}
        found.append({"value": value.item(), "tokens": int(own.sum()), **means})
    return found

"""From the turns of a session to the samples a trainer gets.

Merge rule (I3): a sample holds the turns of its branch up to and including the first one that is not COMPLETED; the
turns after it are dropped and counted. A turn shared by several samples is trained in the first of them only. Turns
that FAILED have no usable output and are part of no branch.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby, takewhile
from typing import Any, NamedTuple

import numpy as np

from harness.samples.proximal import staleness
from harness.samples.side_calls import find_side_calls
from harness.samples.versions import NOT_SAMPLED, Versions, expand_spans, updates_inside
from harness.turn_ends import TurnStatus
from harness.types import Logprobs, Sample, SampleStatus, Turn, as_ids, as_logprobs


class Selection(StrEnum):
    """Which branches of a session become samples."""

    LAST = "last"
    """The branch of the last turn."""
    MAIN = "main"
    """Like `leaves`, without side calls (`samples.side_calls`)."""
    LEAVES = "leaves"
    """Every branch, in the order in which their last turns were admitted."""
    TURNS = "turns"
    """Every turn of every branch, each with its own prompt; the merge rule cuts the branches all the same."""


@dataclass(frozen=True, slots=True)
class MergedBranch:
    """A branch cut by the merge rule."""

    kept: tuple[Turn, ...]
    dropped: tuple[Turn, ...]
    """The turns after the first one that is not COMPLETED."""


def merge_branches(turns: Sequence[Turn], selection: Selection) -> list[MergedBranch]:
    """The selected branches of a session, each cut by the merge rule; empty when no turn has an output."""
    beside = find_side_calls(turns) if selection is Selection.MAIN else frozenset()
    usable = {turn.index: turn for turn in turns if turn.is_usable and turn.index not in beside}
    parents = {turn.parent for turn in usable.values()}
    leaves = [turn for turn in usable.values() if turn.index not in parents]
    if selection is Selection.LAST:
        leaves = [usable[max(usable)]] if usable else []
    branches: list[MergedBranch] = []
    for leaf in leaves:
        branch = [leaf]
        while branch[-1].parent is not None:
            branch.append(usable[branch[-1].parent])
        branch.reverse()
        completed = list(takewhile(lambda turn: turn.status is TurnStatus.COMPLETED, branch))
        end = len(completed) + 1  # the first turn that is not COMPLETED is kept, too (I3)
        branches.append(MergedBranch(tuple(branch[:end]), tuple(branch[end:])))
    return branches


def build_samples(
    turns: Sequence[Turn], selection: Selection, metadata: Mapping[str, Any], live_version: int | None = None
) -> list[Sample]:
    """The samples of a session; `metadata` is copied into each of them, and `live_version` is what lags count from.

    A turn that an abort cut short before its first token is no sample (`count_empty`): trainers divide by its length.
    Raises `UnknownWeightVersion` when a label is not a policy version.
    """
    samples: list[Sample] = []
    trained: set[int] = set()
    for branch in _to_sample(turns, selection):
        if _is_empty(branch, selection):
            continue
        if trained.issuperset(turn.index for turn in branch.kept):
            continue  # cut by the merge rule, it is a part of a sample before it
        samples.append(_build(branch, trained, metadata, live_version, is_single_turn=selection is Selection.TURNS))
        trained.update(turn.index for turn in branch.kept)
    return samples


def count_empty(turns: Sequence[Turn], selection: Selection) -> int:
    """How many samples of a session would have no response token, and are left out."""
    return sum(_is_empty(branch, selection) for branch in _to_sample(turns, selection))


def _to_sample(turns: Sequence[Turn], selection: Selection) -> Sequence[MergedBranch]:
    """A branch for each sample; with TURNS every turn that is kept as the end of one, shared ones again and again."""
    branches = merge_branches(turns, selection)
    if selection is not Selection.TURNS:
        return branches
    ends = [(branch, end) for branch in branches for end in range(1, len(branch.kept) + 1)]
    return [MergedBranch(branch.kept[:end], branch.dropped) for branch, end in ends]


def _is_empty(branch: MergedBranch, selection: Selection) -> bool:
    has_response = len(branch.kept) > 1 and selection is not Selection.TURNS
    return not has_response and branch.kept[-1].output_ids.size == 0


def _build(
    branch: MergedBranch, trained: set[int], metadata: Mapping[str, Any], live: int | None, *, is_single_turn: bool
) -> Sample:
    """The sample of `branch`; of a single turn everything before its output is prompt."""
    turns = branch.kept
    tokens = np.concatenate([part for turn in turns for part in (turn.context_ids, turn.output_ids)])
    start = tokens.size - turns[-1].output_ids.size if is_single_turn else turns[0].context_ids.size
    told = turns[-1:] if is_single_turn else turns
    labels = [span.version for turn in told for span in turn.version_spans]
    columns = _columns(turns, trained, tokens.size).behind(start)
    return Sample(
        tokens=as_ids(tokens),
        response_length=tokens.size - start,
        loss_mask=columns.mask,
        rollout_log_probs=columns.logprobs,
        status=SampleStatus(turns[-1].status),
        weight_versions=tuple(label for label, _ in groupby(labels)),
        behavior_versions=columns.versions,
        proximal_logprobs=columns.proximal_logprobs,
        proximal_versions=columns.proximal_versions,
        repeat_terminated=int(turns[-1].repeat_terminated),
        metadata=_stamp(metadata, MergedBranch(told, branch.dropped), columns, live),
    )


class _Columns(NamedTuple):
    mask: np.ndarray[Any, np.dtype[np.uint8]]
    logprobs: Logprobs
    versions: Versions
    proximal_logprobs: Logprobs
    proximal_versions: Versions

    def behind(self, start: int) -> "_Columns":
        """Without the first tokens, and read-only."""
        return _Columns(
            self.mask[start:],
            as_logprobs(self.logprobs[start:]),
            as_ids(self.versions[start:]),
            as_logprobs(self.proximal_logprobs[start:]),
            as_ids(self.proximal_versions[start:]),
        )


def _columns(turns: Sequence[Turn], trained: Set[int], size: int) -> _Columns:
    """Of each turn the context, which nobody sampled, then its output; those of a turn in `trained` train no more."""
    columns = _Columns(
        np.zeros(size, dtype=np.uint8),
        np.zeros(size, dtype=np.float32),
        np.full(size, NOT_SAMPLED, dtype=np.int32),
        np.zeros(size, dtype=np.float32),
        np.full(size, NOT_SAMPLED, dtype=np.int32),
    )
    end = 0
    for turn in turns:
        start, end = end + turn.context_ids.size, end + turn.context_ids.size + turn.output_ids.size
        versions = expand_spans(turn.version_spans, end - start)
        columns.mask[start : start + turn.masked_from] = turn.index not in trained
        columns.logprobs[start:end] = turn.logprobs
        columns.versions[start:end] = versions
        columns.proximal_logprobs[start:end] = (
            turn.logprobs if turn.proximal_logprobs is None else turn.proximal_logprobs
        )
        columns.proximal_versions[start:end] = versions if turn.proximal_versions is None else turn.proximal_versions
    return columns


def _stamp(metadata: Mapping[str, Any], branch: MergedBranch, columns: _Columns, live: int | None) -> dict[str, Any]:
    last = branch.kept[-1]
    stamped = {**metadata, "turns": [turn.index for turn in branch.kept], "end": str(last.end)}
    if "error" in last.notes:
        stamped["end_error"] = last.notes["error"]
    if branch.dropped:
        stamped["dropped_trailing_turns"] = len(branch.dropped)
    constrained = sum(turn.params.forbids_tokens for turn in branch.kept)
    if constrained:
        stamped["constrained_turns"] = constrained
    scripted = sum(turn.script_step is not None for turn in branch.kept)
    if scripted:
        stamped["scripted_turns"] = scripted
    updates = updates_inside(branch.kept)
    if updates:
        stamped["weight_updates"] = updates
    stale = staleness(columns.versions, columns.proximal_versions, live)
    return stamped if stale is None else {**stamped, "staleness": stale.to_json()}

"""Merge rule: build the samples of a trainer from the branches that `samples.delivery` chose, as columns."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from itertools import groupby
from types import MappingProxyType
from typing import Any

import numpy as np

from harness.samples.delivery import Branch, DeliveryPlan, weigh
from harness.samples.proximal import staleness
from harness.samples.versions import NOT_SAMPLED, expand_spans, updates_inside
from harness.sampling_masks import SampleMasks
from harness.token_rows import SampleRows
from harness.top_logprobs import TopLogprobs
from harness.types import Logprobs, Sample, SampleStatus, Turn, as_ids, as_logprobs

NOT_IN_TIME = "not_in_time"
"""Reason of tokens that a teacher had not scored when the samples were collected."""

NOT_ALIGNED = "not_aligned"
"""Reason of tokens without a counterpart in the teacher's tokenizer or chat template."""

NO_TEACHERS: Mapping[str, str] = MappingProxyType({})


def build_samples(
    plan: DeliveryPlan,
    metadata: Mapping[str, Any],
    live_version: int | None = None,
    teachers: Mapping[str, str] = NO_TEACHERS,
) -> list[Sample]:
    """Build the samples of a session, each with a copy of `metadata`. Lags count from `live_version`.

    `teachers` has the reason why a teacher missed tokens, or an empty one. Raises `UnknownWeightVersion`.
    """
    samples: list[Sample] = []
    masked = {index for index, call in plan.roles.items() if call.role not in plan.trained_roles}
    for branch in plan.delivered:
        samples.append(_teach(_build(branch, plan, masked, metadata, live_version), branch.kept, teachers))
        # A turn is trained in the first sample that contains it (I13).
        masked.update(turn.index for turn in branch.kept)
    return weigh(samples)


def _build(
    branch: Branch, plan: DeliveryPlan, masked: Set[int], metadata: Mapping[str, Any], live: int | None
) -> Sample:
    turns = branch.kept
    tokens = np.concatenate([part for turn in turns for part in (turn.context_ids, turn.output_ids)])
    start = turns[0].context_ids.size
    labels = [span.version for turn in turns for span in turn.version_spans]
    columns = _columns(turns, masked, tokens.size, start)
    stamped = _stamp(metadata, branch, columns, live)
    begins = [turn.prompt_length - start for turn in turns]
    stamped["spans"] = [[at, at + int(turn.output_ids.size)] for at, turn in zip(begins, turns, strict=True)]
    stamped["role"] = str(plan.roles[turns[-1].index].role)
    recorded = [turn.rows for turn in turns if turn.rows is not None]
    rows = SampleRows.of_turns(recorded, tokens.size) if recorded else None
    if rows is not None and rows.missing:
        stamped["missing_rows"] = rows.missing
    masked_turns = [turn.masks for turn in turns if turn.masks is not None]
    masks = SampleMasks.of_turns(masked_turns, start, tokens.size) if masked_turns else None
    if masks is not None:
        stamped["filtered_turns"] = len(masked_turns)
        if masks.missing:
            stamped["missing_masks"] = masks.missing
    return Sample(
        tokens=as_ids(tokens),
        response_length=tokens.size - start,
        status=SampleStatus(turns[-1].status),
        weight_versions=tuple(label for label, _ in groupby(labels)),
        repeat_terminated=int(turns[-1].repeat_terminated),
        metadata=stamped,
        routed_experts=rows,
        sampling_mask=masks,
        **columns,
    )


def _teach(sample: Sample, turns: Sequence[Turn], teachers: Mapping[str, str]) -> Sample:
    if not teachers:
        return sample
    start, is_sampled = sample.tokens.size - sample.response_length, sample.behavior_versions != NOT_SAMPLED
    columns: dict[str, Logprobs] = {}
    told: dict[str, Any] = {}
    for name, reason in teachers.items():
        column = np.full(sample.response_length, np.nan, np.float32)
        scored = [(turn.prompt_length - start, turn.teachers[name]) for turn in turns if name in turn.teachers]
        for at, scores in scored:
            column[at : at + scores.logprobs.size] = scores.logprobs
        columns[name], missing = as_logprobs(column), int(np.isnan(column[is_sampled]).sum())
        told[name] = {"versions": sorted({scores.version for _, scores in scored}), "missing": missing}
        if missing:
            told[name]["reason"] = reason or (NOT_ALIGNED if len(scored) == len(turns) else NOT_IN_TIME)
    tops = {name: top.part(start, sample.tokens.size) for name, top in _tops(turns).items() if name in teachers}
    return replace(sample, teachers=columns, teacher_tops=tops, metadata={**sample.metadata, "teachers": told})


def _tops(turns: Sequence[Turn]) -> dict[str, TopLogprobs]:
    parts: list[dict[str, TopLogprobs]] = []
    for turn in turns:
        parts += {}, {name: scores.top for name, scores in turn.teachers.items() if scores.top is not None}
    return TopLogprobs.join(parts, [each.size for turn in turns for each in (turn.context_ids, turn.output_ids)])


def _columns(turns: Sequence[Turn], masked: Set[int], size: int, start: int) -> dict[str, Any]:
    """Return the columns of the tokens from `start` on, by field: context, never sampled, and output of the turns."""
    mask = np.zeros(size, dtype=np.uint8)
    logprobs, proximal_logprobs = np.zeros((2, size), dtype=np.float32)
    versions, proximal_versions = np.full((2, size), NOT_SAMPLED, dtype=np.int32)
    end = 0
    for turn in turns:
        begin, end = end + turn.context_ids.size, end + turn.context_ids.size + turn.output_ids.size
        own = slice(begin, end)
        mask[begin : begin + turn.masked_from] = turn.index not in masked
        logprobs[own] = turn.logprobs
        versions[own] = expand_spans(turn.version_spans, end - begin)
        proximal_logprobs[own] = turn.logprobs if turn.proximal_logprobs is None else turn.proximal_logprobs
        proximal_versions[own] = versions[own] if turn.proximal_versions is None else turn.proximal_versions
    return {
        "loss_mask": mask[start:],
        "rollout_log_probs": as_logprobs(logprobs[start:]),
        "behavior_versions": as_ids(versions[start:]),
        "proximal_logprobs": as_logprobs(proximal_logprobs[start:]),
        "proximal_versions": as_ids(proximal_versions[start:]),
    }


def _stamp(metadata: Mapping[str, Any], branch: Branch, columns: Mapping[str, Any], live: int | None) -> dict[str, Any]:
    last = branch.kept[-1]
    stamped = {**metadata, "turns": [turn.index for turn in branch.kept], "end": str(last.end)}
    if last.notes.error:
        stamped["end_error"] = last.notes.error
    if branch.dropped:
        stamped["dropped_trailing_turns"] = len(branch.dropped)
    constrained = sum(turn.params.forbids_tokens for turn in branch.kept)
    if constrained:
        stamped["constrained_turns"] = constrained
    scripted = sum(turn.notes.script_step is not None for turn in branch.kept)
    if scripted:
        stamped["scripted_turns"] = scripted
    updates = updates_inside(branch.kept)
    if updates:
        stamped["weight_updates"] = updates
    stale = staleness(columns["behavior_versions"], columns["proximal_versions"], live)
    return stamped if stale is None else {**stamped, "staleness": stale.to_json()}

"""Conversion of a rollout to verl's `AgentLoopOutput`, which needs tokens: rollouts cut short have masked ones."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from harness.adapters.sampling import require_no_masks, require_no_teachers
from harness.adapters.step_reports import ReportedSample, report_samples
from harness.samples.columns import TRAINER_COLUMNS, trainer_columns, unsampled
from harness.samples.delivery import DeliveredTokens, SampleDelivery, cut_response, weigh
from harness.samples.miles_codec import require_experts
from harness.samples.rollout import Rollout
from harness.samples.versions import NOT_SAMPLED, count_versions
from harness.token_rows import RoutedExperts
from harness.types import Json, Sample

FIELDS = frozenset(
    {
        *("prompt_ids", "response_ids", "response_mask", "response_logprobs", "reward_score", "num_turns", "metrics"),
        *("extra_fields", "routed_experts"),
    }
)
"""Fields of verl's `AgentLoopOutput` that this module sets."""

STAMPS = "harness"
"""`extra_fields` key of the session's facts."""

_EXTRA = tuple(column.trainer_name for column in TRAINER_COLUMNS if column.name != "behavior_versions")

TOO_LONG = "too_long"
"""Ledger reason for tokens that verl has no room for."""


class Room(NamedTuple):
    prompt: int
    response: int


def fit(rollout: Rollout, room: Room, *, is_trained: bool) -> Rollout:
    """Return `rollout` with the samples that fit; the rest is `too_long`. Masks all tokens unless `is_trained`."""
    # A longer response is cut at its end, as by verl. A sample with a longer prompt is dropped, since its response
    # depends on it; the last one stays, masked.
    delivery = SampleDelivery(rollout.samples)
    fitting = [cut_response(each, room.response) for each in rollout.samples if _prompt_length(each) <= room.prompt]
    taken = [delivery.take(each) if is_trained else _mask(each) for each in fitting]
    taken.sort(key=lambda each: bool(each.loss_mask.any()))  # verl reads the advantage of all in a token of the last
    before, after = DeliveredTokens.of(rollout.samples), DeliveredTokens.of(taken)
    ledger = dict(rollout.session["ledger"])
    ledger["trained"] += after.trained - before.trained
    ledger["masked"] += after.masked - before.masked
    if lost := sum(before) - sum(after):
        ledger["dropped"] = {**ledger["dropped"], TOO_LONG: lost}
    samples = weigh(taken or [_mask(cut_response(each, room.response)) for each in rollout.samples[-1:]])
    return replace(rollout, samples=tuple(samples), session={**rollout.session, "ledger": ledger})


def output_fields(
    rollout: Rollout,
    sample: Sample | None,
    room: Room,
    filler_id: int,
    global_steps: int | None,
    *,
    router: RoutedExperts | None = None,
) -> Json:
    """Build the fields of one output, except its reward: of a sample of `fit`, or of fillers without one.

    A longer prompt is cut at its beginning. The version of `global_steps`, from 1, replaces labels that are no numbers.
    `router` is the model's, if verl replays it.
    """
    version = max(0, (global_steps or 0) - 1)
    known = unsampled([filler_id], [filler_id]) if sample is None else sample
    columns = _columns(known, room, version)
    versions = [each for each in columns.pop("behavior_versions") if each != NOT_SAMPLED] or [version]
    turns = rollout.session["turns"]
    generating = float(sum(turn["seconds"] for turn in turns))
    stamps: Json = {
        "outcome": str(rollout.outcome.kind),
        "outcome_detail": rollout.outcome.detail,
        "ledger": rollout.session["ledger"],
        "weight": known.weight,
        "repeat_terminated": known.repeat_terminated,
        "score": known.metadata.get("score", {}),
    }
    extra: Json = {
        "turn_scores": [],
        "tool_rewards": [],
        "reward_extra_info": {},  # verl copies the last output's of a list
        "min_global_steps": min(versions),
        "max_global_steps": max(versions),
        **{name: columns.pop(name) for name in _EXTRA},
        STAMPS: stamps,
    }
    if router is not None:
        columns["routed_experts"] = _experts(sample, len(columns["prompt_ids"]) + len(columns["response_ids"]), router)
    metrics = {"generate_sequences": generating, "tool_calls": max(0.0, rollout.seconds - generating)}
    return {**columns, "num_turns": 2 * len(turns), "metrics": metrics, "extra_fields": extra}


def report_batch(steps: int, batch: Any) -> None:
    """Report the step of a `DataProto` of `AgentLoopManager`. Raises `AdapterError` naming a variable."""
    stamps = batch.non_tensor_batch[STAMPS]
    scores = batch.batch["rm_scores"].sum(-1).tolist() if "rm_scores" in batch.batch else [None] * len(stamps)
    report_samples(steps, map(ReportedSample, scores, stamps))


def _prompt_length(sample: Sample) -> int:
    return len(sample.tokens) - sample.response_length


def _mask(sample: Sample) -> Sample:
    return replace(sample, loss_mask=np.zeros_like(sample.loss_mask))


def _columns(sample: Sample, room: Room, version: int) -> dict[str, Any]:
    require_no_masks(sample, "verl")
    require_no_teachers(sample, "verl")
    prompt_length = _prompt_length(sample)
    prompt, response = sample.tokens[:prompt_length], sample.tokens[prompt_length:]
    versions = count_versions(sample, version)
    columns: dict[str, npt.NDArray[Any]] = {
        "response_ids": response,
        "response_mask": sample.loss_mask,
        "response_logprobs": sample.rollout_log_probs,
        **trainer_columns(sample),
        "behavior_versions": versions.behavior,
        "proximal_versions": versions.proximal,
    }
    lists = {name: column.tolist() for name, column in columns.items()}
    return {"prompt_ids": prompt[-room.prompt :].tolist(), **lists}


def _experts(sample: Sample | None, tokens: int, router: RoutedExperts) -> npt.NDArray[np.int16]:
    if sample is None:  # verl's columns have one shape, and it replays no row of an output that is not trained
        return np.zeros((tokens - 1, router.layers, router.top_k), np.int16)
    experts = require_experts(sample, np.int16)
    assert experts is not None
    return experts[len(sample.tokens) - tokens :]

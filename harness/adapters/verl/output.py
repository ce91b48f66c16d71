"""From a rollout to the fields of verl's `AgentLoopOutput`. Pure.

verl rejects no rollout: it has to get tokens for every one of them. Those of one that was cut short are masked.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from harness.samples.rollout import Rollout
from harness.samples.versions import NOT_SAMPLED, count_versions
from harness.types import Json, Sample

FIELDS = frozenset(
    {
        *("prompt_ids", "response_ids", "response_mask", "response_logprobs", "reward_score", "num_turns", "metrics"),
        "extra_fields",
    }
)
"""Of verl's `AgentLoopOutput`: those that are written here."""

STAMPS = "harness"
"""Key in `extra_fields` of what the session says of the rollout."""


class Room(NamedTuple):
    """Tokens that verl has room for."""

    prompt: int
    response: int


def output_fields(rollout: Rollout, room: Room, filler_id: int, global_steps: int | None, *, is_trained: bool) -> Json:
    """The fields of `rollout`, all but its reward.

    Args:
        rollout: With one sample, or none.
        room: A longer response is cut at its end, as by verl's own loops. A longer prompt is cut at its beginning, and
            nothing after it is trained: it was sampled behind the whole.
        filler_id: The one token of prompt and response where there is no sample.
        global_steps: The step that asks, counted from 1; its weights are version `global_steps - 1` where the engines'
            labels say nothing.
        is_trained: False masks every token.
    """
    version = max(0, (global_steps or 0) - 1)
    columns = _columns(rollout.samples[0], room, version) if rollout.samples else _filler(filler_id)
    if not is_trained:
        columns["response_mask"] = [0] * len(columns["response_ids"])
    versions = [each for each in columns.pop("behavior_versions") if each != NOT_SAMPLED] or [version]
    turns = rollout.session["turns"]
    generating = float(sum(turn["seconds"] for turn in turns))
    stamps: Json = {
        "outcome": str(rollout.outcome.kind),
        "outcome_detail": rollout.outcome.detail,
        "ledger": rollout.session["ledger"],
    }
    extra: Json = {
        "turn_scores": [],
        "tool_rewards": [],
        "min_global_steps": min(versions),
        "max_global_steps": max(versions),
        "proximal_log_probs": columns.pop("proximal_log_probs"),
        "proximal_versions": columns.pop("proximal_versions"),
        STAMPS: stamps,
    }
    metrics = {"generate_sequences": generating, "tool_calls": max(0.0, rollout.seconds - generating)}
    return {**columns, "num_turns": 2 * len(turns), "metrics": metrics, "extra_fields": extra}


def _columns(sample: Sample, room: Room, version: int) -> dict[str, Any]:
    prompt_length = len(sample.tokens) - sample.response_length
    prompt, response = sample.tokens[:prompt_length], sample.tokens[prompt_length:]
    mask = sample.loss_mask if prompt_length <= room.prompt else np.zeros_like(sample.loss_mask)
    versions = count_versions(sample, version)
    columns: dict[str, npt.NDArray[Any]] = {
        "response_ids": response,
        "response_mask": mask,
        "response_logprobs": sample.rollout_log_probs,
        "behavior_versions": versions.behavior,
        "proximal_log_probs": sample.proximal_logprobs,
        "proximal_versions": versions.proximal,
    }
    cut = {name: column[: room.response].tolist() for name, column in columns.items()}
    return {"prompt_ids": prompt[-room.prompt :].tolist(), **cut}


def _filler(filler_id: int) -> dict[str, Any]:
    return {
        "prompt_ids": [filler_id],
        "response_ids": [filler_id],
        "response_mask": [0],
        "response_logprobs": [0.0],
        "behavior_versions": [NOT_SAMPLED],
        "proximal_log_probs": [0.0],
        "proximal_versions": [NOT_SAMPLED],
    }

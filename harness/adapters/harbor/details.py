"""From a session's record to the fields of Harbor's `AgentContext`, without I/O."""

from asyncio import CancelledError
from typing import Any

import numpy.typing as npt

from harness.rollouts.client.session_server import Collected
from harness.rollouts.outcome import AgentEnd, Ending, RolloutFacts, classify
from harness.samples.roles import Role
from harness.samples.rollout import Outcome, OutcomeKind
from harness.sessions.lifecycle import Phase
from harness.types import Json, Sample


def outcome_of(failure: BaseException | None, record: Collected) -> Outcome:
    """Classify a run that raised `failure`; DRAINED if its session ended first."""
    phase = record.facts.phase
    is_deleted = record.lost is None and phase not in list(Phase)
    if is_deleted or (failure is not None and phase == Phase.CLOSING):
        # Without its session an agent fails in a way of its own, or waits for Harbor's timeout.
        end = AgentEnd(Ending.STOPPED)
    elif isinstance(failure, CancelledError):
        end = AgentEnd(Ending.TIMED_OUT)
    elif failure is not None:
        # Its text may hold the output of a command.
        end = AgentEnd(Ending.RAISED, detail=f"{type(failure).__name__}: {failure}"[:200])
    else:
        end = AgentEnd(Ending.RETURNED)
    return classify(RolloutFacts.of(end, record))


def context_fields(session_id: str, outcome: Outcome, record: Collected) -> Json:
    """Return the fields of an `AgentContext` that a session knows."""
    turns = record.session["turns"]
    samples = sorted(record.samples, key=lambda sample: sample.metadata["role"] != Role.MAIN)
    return {
        "n_input_tokens": sum(turn["prompt_length"] for turn in turns),
        "n_cache_tokens": sum(turn["notes"].get("cached_tokens") or 0 for turn in turns),
        "n_output_tokens": sum(turn["output_length"] for turn in turns),
        "rollout_details": [rollout_detail(sample) for sample in samples],
        "metadata": {
            "session_id": session_id,
            "outcome": str(outcome.kind),
            "outcome_detail": outcome.detail,
            "aborted": outcome.kind is OutcomeKind.DRAINED,
            "samples": [
                {"role": each.metadata["role"], "status": str(each.status), "weight": each.weight} for each in samples
            ],
            "ledger": record.session["ledger"],
        },
    }


def rollout_detail(sample: Sample) -> Json:
    """Return Harbor's `RolloutDetail` of a branch: lists with an entry per turn."""
    ids, start = sample.tokens.tolist(), sample.tokens.size - sample.response_length
    spans: list[tuple[int, int]] = sample.metadata["spans"]

    def cut(column: npt.NDArray[Any]) -> list[list[Any]]:
        return [column[begin:end].tolist() for begin, end in spans]

    return {
        "prompt_token_ids": [ids[: start + begin] for begin, _ in spans],
        "completion_token_ids": [ids[start + begin : start + end] for begin, end in spans],
        "logprobs": cut(sample.rollout_log_probs),
        "extra": {
            "loss_mask": cut(sample.loss_mask),
            "behavior_versions": cut(sample.behavior_versions),
            "turn": list(sample.metadata["turns"]),
        },
    }

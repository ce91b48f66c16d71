"""From an admitted turn to its outcome: pure functions that make the `Turn` to be stored and then recorded.

A turn is made first, made durable second and recorded by its session third, so that nothing can be extended, collected
or answered that a restart would not find again (I9).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from harness.errors import HarnessError
from harness.sessions.divergence import Divergence
from harness.sessions.lifecycle import STATUS_OF_FINISH
from harness.sessions.token_log import TokenPath
from harness.tokens.matching import ChainKey
from harness.types import (
    GenerationResult,
    Json,
    Message,
    SamplingParams,
    SamplingWishes,
    Segment,
    TokenIds,
    Turn,
    TurnStatus,
    as_ids,
    as_logprobs,
)


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A model call, as far as the core is concerned."""

    messages_delta: tuple[Message, ...]
    """Messages the attach point does not have."""
    context_ids: TokenIds
    """Their ids, delimiter and generation prompt included."""
    asked: SamplingWishes
    digest: str
    """blake2b-128 of the request body."""
    divergence: Divergence | None = None
    """Why this request starts a branch, when an earlier one went on from the same place."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A turn in flight."""

    index: int
    parent: int | None
    key: ChainKey
    ordinal: int
    """How many turns with this key were admitted before."""
    path: TokenPath
    """The whole prompt."""
    request: TurnRequest
    params: SamplingParams
    admitted_at: float
    """Unix seconds."""

    @property
    def prompt_ids(self) -> TokenIds:
        """The whole prompt, read-only."""
        return self.path.ids


@dataclass(frozen=True, slots=True)
class Reply:
    """What the agent gets to read of an output."""

    message: Message
    finish_reason: str
    notes: Mapping[str, Any] = field(default_factory=dict)


def completed_turn(admission: Admission, result: GenerationResult, reply: Reply, now: float) -> Turn:
    """The turn for which an engine sampled `result`."""
    return replace(
        _blank_turn(admission, now),
        status=STATUS_OF_FINISH[result.finish_reason],
        finish_reason=reply.finish_reason,
        output_ids=result.output_ids,
        logprobs=result.logprobs,
        version_spans=result.version_spans,
        segments=(Segment(result.request_id, 0, result.output_ids.size, result.finish_reason),),
        reply=reply.message,
        notes={**reply.notes, "cached_tokens": result.cached_tokens, **_branch_note(admission)},
    )


def failed_turn(admission: Admission, error: HarnessError, now: float) -> Turn:
    """The turn that ended without a usable output."""
    return replace(_blank_turn(admission, now), notes=_error_note(error))


def lost_turn(turn: Turn, error: HarnessError) -> Turn:
    """What is left of a turn that could not be made durable: nobody was answered, its tokens are dropped."""
    return replace(
        turn,
        status=TurnStatus.FAILED,
        finish_reason="error",
        reply={"role": "assistant"},
        notes={**turn.notes, **_error_note(error)},
    )


def digest_ids(ids: TokenIds) -> str:
    """blake2b-128 of the little-endian int32 bytes of `ids`, as 32 hex digits."""
    return blake2b(np.ascontiguousarray(ids, dtype="<i4").data, digest_size=16).hexdigest()


def _blank_turn(admission: Admission, now: float) -> Turn:
    request = admission.request
    return Turn(
        index=admission.index,
        parent=admission.parent,
        status=TurnStatus.FAILED,
        finish_reason="error",
        context_ids=request.context_ids,
        prompt_length=admission.path.length,
        prompt_digest=digest_ids(admission.prompt_ids),
        output_ids=as_ids(()),
        logprobs=as_logprobs(()),
        version_spans=(),
        segments=(),
        messages_delta=request.messages_delta,
        key=admission.key,
        ordinal=admission.ordinal,
        reply={"role": "assistant"},
        sampling={"asked": request.asked.stated(), "used": _used(admission.params)},
        request_digest=request.digest,
        created_at=admission.admitted_at,
        seconds=now - admission.admitted_at,
    )


def _used(params: SamplingParams) -> Json:
    """The parameters of the whole turn; `continues` belongs to single requests."""
    return {each.name: getattr(params, each.name) for each in fields(params) if each.name != "continues"}


def _branch_note(admission: Admission) -> Json:
    diverged = admission.request.divergence
    return {} if diverged is None else {"diverged": diverged.to_json()}


def _error_note(error: HarnessError) -> Json:
    return {"error": {"code": error.code, "cause": str(error.cause), "message": error.message}}

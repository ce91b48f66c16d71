"""From an admitted turn to its outcome: pure functions that make the `Turn` to be stored and then recorded.

A turn is made first, made durable second and recorded by its session third, so that nothing can be extended, collected
or answered that a restart would not find again (I9).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import convert

from harness.errors import HarnessError
from harness.samples.proximal import keep_scores, score_turns
from harness.sessions.continuation import Output
from harness.sessions.divergence import Divergence
from harness.sessions.lifecycle import end_of_error
from harness.sessions.script import Step
from harness.sessions.token_log import TokenPath
from harness.tokens.matching import ChainKey
from harness.turn_ends import TurnEnd, status_of
from harness.types import Json, Message, SamplingParams, SamplingWishes, TokenIds, Turn, as_ids


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A model call, as far as the core is concerned."""

    messages_delta: tuple[Message, ...]
    """Messages the attach point does not have."""
    context_ids: TokenIds
    """Their ids, delimiter and generation prompt included."""
    asked: SamplingWishes
    digest: str
    """Of the request body."""
    script_step: int | None = None
    """The step that it says of the session's script; None leaves that to the model."""
    divergence: Divergence | None = None
    """Why this request starts a branch, when an earlier one went on from the same place."""
    tools: tuple[Json, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)
    """What the record says of the call beside its messages (`Turn.notes`)."""


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
    prior: Turn | None = None
    """The turn as it broke off, when this takes it up again."""
    step: Step | None = None
    """Its words."""

    @property
    def prompt_ids(self) -> TokenIds:
        """The whole prompt, read-only."""
        return self.path.ids

    @property
    def script_ids(self) -> TokenIds | None:
        """The ids it says; None leaves them to the model."""
        return None if self.step is None else as_ids(self.step.ids)

    @property
    def attempt(self) -> int:
        """Which time this is that the turn is in flight, from 1."""
        return 1 if self.prior is None else self.prior.attempts + 1

    @property
    def response_id(self) -> str | None:
        """The id of its answer; None where nobody has chosen one."""
        return self.request.notes.get("response_id")

    def output_so_far(self) -> Output:
        """The output of earlier requests of this turn."""
        return Output.nothing() if self.prior is None else Output.of_turn(self.prior)


def readmit(turn: Turn, path: TokenPath, step: Step | None, now: float, notes: Mapping[str, Any]) -> Admission:
    """The admission of a turn that broke off and goes on; `path` is its whole prompt, `step` what it says.

    `notes` are those of the call that goes on with it, where they are not those of the one before.
    """
    asked = convert(turn.sampling["asked"], SamplingWishes)
    request = TurnRequest(
        turn.messages_delta, turn.context_ids, asked, turn.request_digest, turn.script_step, notes=notes
    )
    place = (turn.index, turn.parent, turn.key, turn.ordinal)
    return Admission(*place, path, request, turn.params, now, prior=turn, step=step)


@dataclass(frozen=True, slots=True)
class Reply:
    """An output, as the agent gets to read it."""

    message: Message
    end: TurnEnd
    """How that makes the turn end."""
    notes: Mapping[str, Any] = field(default_factory=dict)


NO_REPLY: Message = {"role": "assistant"}
"""Of a turn with nothing to be read as an answer."""


def end_turn(
    admission: Admission,
    output: Output,
    reply: Reply,
    now: float,
    error: HarnessError | None = None,
    *,
    held_s: float = 0.0,
) -> Turn:
    """The turn that ended with `output`: by itself, at a limit, or cut short, in which `error` had a part.

    `held_s` are the seconds since this admission in which it was held at the gate.
    It has the proximal values that its own requests, and those before it broke off, have brought (I7).
    """
    request, prior = admission.request, admission.prior
    # An earlier attempt's, its error excepted, stand beside those of this one.
    notes: Json = {"cached_tokens": output.cached_tokens} if output.segments else {}
    if prior is not None:
        notes |= {name: value for name, value in prior.notes.items() if name != "error"}
    notes |= request.notes
    if request.divergence is not None:
        notes["diverged"] = request.divergence.to_json()
    if request.script_step is not None:
        notes["script_step"] = request.script_step
    if admission.attempt > 1:
        notes["attempts"] = admission.attempt
    if held_s:
        notes["held_s"] = notes.get("held_s", 0.0) + held_s
    turn = Turn(
        index=admission.index,
        parent=admission.parent,
        status=status_of(reply.end, output.ids.size),
        end=reply.end,
        context_ids=request.context_ids,
        prompt_length=admission.path.length,
        prompt_digest=admission.path.digest(),
        output_ids=output.ids,
        logprobs=output.logprobs,
        version_spans=output.version_spans,
        segments=output.segments,
        messages_delta=request.messages_delta,
        key=admission.key,
        ordinal=admission.ordinal,
        reply=reply.message,
        sampling={"asked": request.asked.to_dict(), "used": admission.params.to_dict()},
        request_digest=request.digest,
        created_at=admission.admitted_at if prior is None else prior.created_at,
        seconds=max(0.0, now - admission.admitted_at) + (0.0 if prior is None else prior.seconds),
        notes={**notes, **reply.notes, **_error_note(error)},
        forced_tokens=output.forced_tokens,
        discarded=output.discarded,
        unknown=output.unknown,
    )
    if prior is not None and prior.is_suspended:
        turn = keep_scores(turn, prior)
    for scoring in output.scorings:
        turn = next(iter(score_turns([turn], scoring)), turn)
    return turn


def break_off_turn(
    admission: Admission, output: Output, error: HarnessError, now: float, *, held_s: float = 0.0
) -> Turn:
    """The turn that nobody could be answered; the same request takes it up again (I5).

    Its end decides whether a turn without any output is FAILED; whatever was sampled is kept for the retry.
    """
    return end_turn(admission, output, Reply(NO_REPLY, end_of_error(error)), now, error, held_s=held_s)


def lose_turn(turn: Turn, error: HarnessError) -> Turn:
    """The remains of a turn that could not be made durable: nobody was answered, its tokens are dropped."""
    end = TurnEnd.STORE_FAILED
    status = status_of(end, turn.output_ids.size)
    return replace(turn, status=status, end=end, reply=NO_REPLY, notes={**turn.notes, **_error_note(error)})


def _error_note(error: HarnessError | None) -> Json:
    if error is None:
        return {}
    return {"error": {"code": error.code, "cause": str(error.cause), "message": error.message}}

"""Outcome of an admitted turn, as pure functions.

A turn is built, stored, then recorded, so everything that can be extended, collected or answered survives a restart
(I9).
"""

import msgspec
from msgspec import structs

from harness.decoding import convert
from harness.errors import HarnessError
from harness.samples.proximal import keep_scores, score_turns
from harness.sessions.continuation import Output
from harness.sessions.lifecycle import end_of_error
from harness.sessions.script import Step
from harness.sessions.token_log import TokenPath
from harness.token_rows import TurnRows
from harness.tokens.matching import ChainKey
from harness.turn_ends import TurnEnd, status_of
from harness.types import Json, Message, SamplingParams, SamplingWishes, TokenIds, Turn, TurnNotes, as_ids


class TurnRequest(msgspec.Struct, frozen=True):
    """Model call, as the core sees it; see `Turn`."""

    messages_delta: tuple[Message, ...]
    context_ids: TokenIds
    asked: SamplingWishes
    digest: str
    tools: tuple[Json, ...] = ()
    notes: TurnNotes = TurnNotes()


class Admission(msgspec.Struct, frozen=True):
    """Turn in flight."""

    index: int
    parent: int | None
    key: ChainKey
    ordinal: int
    path: TokenPath
    request: TurnRequest
    params: SamplingParams
    admitted_at: float
    """Unix seconds."""
    prior: Turn | None = None
    """Earlier outcome, when taken up again."""
    step: Step | None = None
    records_rows: bool = False

    @property
    def prompt_ids(self) -> TokenIds:
        return self.path.ids

    @property
    def script_ids(self) -> TokenIds | None:
        """Ids to force."""
        return None if self.step is None else as_ids(self.step.ids)

    @property
    def attempt(self) -> int:
        """From 1."""
        return 1 if self.prior is None else self.prior.notes.attempts + 1

    def output_so_far(self) -> Output:
        """Return the output of earlier requests."""
        output = Output.nothing() if self.prior is None else Output.of_turn(self.prior)
        if self.params.sampling_mask and output.masks is None:
            output = structs.replace(output, masks=TurnRows(self.path.length))
        if not self.records_rows or output.rows is not None:
            return output
        before = self.path.length - int(self.request.context_ids.size)
        return structs.replace(output, rows=TurnRows(max(0, before - 1)))


def readmit(
    turn: Turn, path: TokenPath, step: Step | None, now: float, response_id: str, *, records_rows: bool = False
) -> Admission:
    """Return the admission of a broken-off turn with its whole prompt `path`."""
    asked = convert(turn.sampling["asked"], SamplingWishes)
    notes = structs.replace(turn.notes, response_id=response_id)
    request = TurnRequest(turn.messages_delta, turn.context_ids, asked, turn.request_digest, notes=notes)
    place = (turn.index, turn.parent, turn.key, turn.ordinal)
    return Admission(*place, path, request, turn.params, now, prior=turn, step=step, records_rows=records_rows)


class Reply(msgspec.Struct, frozen=True):
    """Output, as the agent reads it."""

    message: Message
    end: TurnEnd
    is_malformed: bool = False
    """A tool call cannot be parsed."""
    matched_stop: str = ""


NO_REPLY: Message = {"role": "assistant"}
"""Reply without a readable answer."""


def end_turn(
    admission: Admission,
    output: Output,
    reply: Reply,
    now: float,
    error: HarnessError | None = None,
    *,
    held_s: float = 0.0,
) -> Turn:
    """Return the turn that ended with `output`; `held_s` is this admission's time at the gate."""
    request, prior = admission.request, admission.prior
    earlier = request.notes  # an earlier attempt's too
    is_first_output = earlier.cached_tokens is None and output.segments
    notes = structs.replace(
        earlier,
        cached_tokens=output.cached_tokens if is_first_output else earlier.cached_tokens,
        attempts=admission.attempt,
        held_s=earlier.held_s + held_s,
        malformed_tool_call=reply.is_malformed or earlier.malformed_tool_call,
        matched_stop=reply.matched_stop or earlier.matched_stop,
        error=_error_note(error),
        missing_rows=output.missing_rows,
        rows_until=output.rows_until(admission.path.length),
        row_bytes=output.row_bytes,
    )
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
        notes=notes,
        forced_tokens=output.forced_tokens,
        discarded=output.discarded,
        unknown=output.unknown,
        rows=output.rows,
        masks=output.masks,
    )
    # Proximal values come from earlier attempts and from this one's requests (I7).
    if prior is not None and prior.is_suspended:
        turn = keep_scores(turn, prior)
    for scoring in output.scorings:
        turn = next(iter(score_turns([turn], scoring)), turn)
    return turn


def break_off_turn(
    admission: Admission, output: Output, error: HarnessError, now: float, *, held_s: float = 0.0
) -> Turn:
    """Return an unanswered turn; its retry continues it (I5)."""
    # The end decides whether a turn without output is FAILED. Sampled tokens are kept for the retry.
    return end_turn(admission, output, Reply(NO_REPLY, end_of_error(error)), now, error, held_s=held_s)


def lose_turn(turn: Turn, error: HarnessError) -> Turn:
    """Return a turn that the store did not keep."""
    end = TurnEnd.STORE_FAILED
    notes = structs.replace(turn.notes, error=_error_note(error))
    return structs.replace(turn, status=status_of(end, turn.output_ids.size), end=end, reply=NO_REPLY, notes=notes)


def _error_note(error: HarnessError | None) -> Json:
    return {} if error is None else {"code": error.code, "cause": str(error.cause), "message": error.message}

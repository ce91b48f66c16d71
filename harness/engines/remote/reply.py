"""Verifies an engine's reply and turns it into a `GenerationResult`. No I/O.

Providers convert answers to an `EngineReply` without judging them. `verify_reply` checks ids, counts, logprobs and
version spans against each other and the request. Any disagreement raises `EngineReplyInvalid` naming both values.
Nothing is repaired; the trainer sees exactly what passes.
"""

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn, Self

import msgspec
import numpy as np
import numpy.typing as npt

from harness.engines.base import Capabilities, check_request
from harness.errors import EngineReplyInvalid
from harness.samples.versions import require_settled
from harness.token_rows import RaggedRows, RoutedExperts, TokenRows
from harness.top_logprobs import TopLogprobs
from harness.types import (
    FinishReason,
    GenerationDelta,
    GenerationRequest,
    GenerationResult,
    Json,
    Logprobs,
    PromptLogprobs,
    VersionSpan,
    as_ids,
    as_logprobs,
)
from server_patch.force_tokens.script import PARAMETER as FORCE_IDS
from server_patch.repeat_terminate.signals import PREFIX_LENGTH, PROBE

_ROUNDING = 1e-4  # a log-softmax in float32 may end this far above zero


class ScoredToken(NamedTuple):
    """Token and its reported logprob; None if not a number."""

    token_id: int
    logprob: float | None


class Scored(msgspec.Struct, frozen=True, eq=False):
    """Reported logprobs as columns."""

    named: Sequence[int]
    """Token ids they belong to."""
    logprobs: npt.NDArray[np.float64]
    """NaN if not a number."""

    @classmethod
    def of(cls, named: Sequence[int], logprobs: Sequence[float | None]) -> Self:
        """Build columns from sequences of equal length."""
        try:
            values = np.frombuffer(struct.pack(f"{len(logprobs)}d", *logprobs)).copy()  # None raises
        except struct.error:
            values = np.asarray(logprobs, dtype=np.float64)  # slower; None becomes NaN
        return cls(named, values)

    @classmethod
    def of_tokens(cls, tokens: Sequence[ScoredToken]) -> Self:
        return cls.of([token.token_id for token in tokens], [token.logprob for token in tokens])

    def __len__(self) -> int:
        return len(self.named)


class Asked(msgspec.Struct, frozen=True):
    """Request that a reply answers."""

    engine: str
    """Engine kind and address, for messages."""
    request: GenerationRequest
    vocab_size: int
    is_guarded: bool = False
    """True if replies carry the mark of a proven repeat guard."""
    probes_guard: bool = False
    """True for a request that asks for the server's guard."""
    is_scoring: bool = False
    """True for a request that samples nothing."""
    rank: int | None = None
    """Data-parallel rank that serves it; None lets the server choose."""
    router: RoutedExperts | None = None
    """Model's router, if the request asks for rows."""

    @property
    def name(self) -> str:
        return f"{self.engine}, request {self.request.request_id}"

    @property
    def prompt_top(self) -> int:
        """Alternatives of each scored input token: a turn that scores its input on the way wants none."""
        return self.request.params.top_logprobs if self.is_scoring else 0

    @property
    def wants_masks(self) -> bool:
        """True to ask for masks; a script's masks are its ids."""
        return self.request.params.sampling_mask and self.request.script_ids is None

    @property
    def row_bytes(self) -> int:
        """Most bytes of routed experts in the reply: int32 in base64."""
        start, request = self.request.rows_from, self.request
        if start is None or self.router is None:
            return 0
        tokens = int(request.input_ids.size) + request.params.max_new_tokens - start
        return tokens * self.router.layers * self.router.top_k * 6

    @property
    def plugin_arguments(self) -> Json:
        """Arguments for our plugins in the server."""
        continued = {PREFIX_LENGTH: self.request.continues} if self.request.continues else {}
        probe = {PROBE: 1} if self.probes_guard else {}
        script_ids = self.request.script_ids
        return continued | probe | ({} if script_ids is None else {FORCE_IDS: script_ids.tolist()})

    def write_body(self, fields: Json, ids_name: str) -> list[bytes | memoryview]:
        """Encode `fields` and append the input ids, which are encoded already."""
        head = msgspec.json.encode(fields)
        return [head[:-1] + b',"%s":' % ids_name.encode(), self.request.input_json(), b"}"]


class EngineReply(msgspec.Struct, frozen=True):
    """The engine's claims; None or empty without one."""

    output_ids: Sequence[int]
    scored: Scored
    """Logprob of each output token."""
    finish_reason: str
    request_id: str
    """Without the engine's prefix."""
    version_spans: Sequence[VersionSpan]
    version: str
    """Label of the weights that read, and scored, the prompt."""
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    matched_stop: int | str | None = None
    top: Sequence[Sequence[ScoredToken]] = ()
    """Alternatives of each output token, in any order."""
    prompt_scored: Scored | None = None
    """Input tokens from `prompt_logprobs_from` on."""
    prompt_top: Sequence[Sequence[ScoredToken]] = ()
    """Most likely tokens in their places."""
    cached_tokens: int = 0
    rows: npt.NDArray[np.integer[Any]] | None = None
    """Expert ids from `rows_from` on, shape [tokens, layers, top_k]."""
    masks: Sequence[Sequence[int]] | None = None
    """Candidates of each output token."""
    has_lost_tokens: bool = False
    """True if it may have sampled more than it returned."""
    seconds: float = 0.0


def fit_budget(capabilities: Capabilities, asked: Asked) -> Asked:
    """Limit the budget to the rest of the context. Raises `EngineRejected`."""
    request, params = asked.request, asked.request.params
    check_request(capabilities, request)
    budget = capabilities.context_length - request.input_ids.size
    if params.sampling_mask and not params.top_k:  # servers take no request for masks without a bound
        params = replace(params, top_k=capabilities.max_mask_ids)
    if params.max_new_tokens > budget:
        params = replace(params, max_new_tokens=budget)
    if params is request.params:
        return asked
    return msgspec.structs.replace(asked, request=replace(request, params=params))


def verify_reply(asked: Asked, reply: EngineReply) -> GenerationResult:
    """Verify `reply`. Raises `EngineReplyInvalid` or `UnknownWeightVersion`."""
    _require_equal(asked, "the request id", asked.request.request_id, reply.request_id)
    try:
        reason = FinishReason(reply.finish_reason)
    except ValueError:
        refuse(asked, f"finish reason {reply.finish_reason!r}, expected one of {', '.join(FinishReason)}")
    tokens = verify_tokens(asked, reply.output_ids, reply.scored)
    size = tokens.output_ids.size
    if reply.completion_tokens is not None:
        _require_equal(asked, "the number of output tokens", reply.completion_tokens, size)
    if reply.prompt_tokens is not None:
        _require_equal(asked, "the number of input tokens", asked.request.input_ids.size, reply.prompt_tokens)
    if size > asked.request.params.max_new_tokens:
        refuse(asked, f"{size} output tokens, at most {asked.request.params.max_new_tokens} were asked for")
    script_ids = asked.request.script_ids
    if script_ids is not None and not np.array_equal(tokens.output_ids, script_ids[:size]):
        refuse(asked, f"other ids than the script it was to follow: {tokens.output_ids.tolist()!r:.200}")
    if not size and reason is not FinishReason.ABORT:
        refuse(asked, f"finish reason {reply.finish_reason!r} without any output token")
    version_spans = _verify_spans(asked, reply.version_spans, size)
    return GenerationResult(
        request_id=asked.request.request_id,
        input_ids=asked.request.input_ids,
        output_ids=tokens.output_ids,
        logprobs=tokens.logprobs,
        finish_reason=reason,
        version_spans=version_spans,
        matched_stop=reply.matched_stop if reason is FinishReason.STOP else None,
        top_logprobs=_verify_top(asked, reply.top, size),
        prompt_logprobs=_verify_prompt(asked, reply, reason),
        # Servers that continue a request under other weights read its tokens again, and return the rows of that pass.
        rows=_verify_rows(asked, reply.rows, size) if len(version_spans) == 1 else None,
        masks=_read_masks(asked, reply),
        unheard_tokens=asked.request.params.max_new_tokens - size if reply.has_lost_tokens else 0,
        cached_tokens=reply.cached_tokens,
        seconds=reply.seconds,
    )


def verify_tokens(
    asked: Asked, ids: Sequence[int], scored: Scored, spans: tuple[VersionSpan, ...] = ()
) -> GenerationDelta:
    """Verify sampled ids with one logprob each, whole or a piece; `spans` are not checked."""
    if len(ids) != len(scored):
        refuse(asked, f"{len(ids)} output ids but {len(scored)} logprobs")
    wide = verify_ids(asked, ids)
    return GenerationDelta(as_ids(wide), _verify_logprobs(asked, "output", ids, scored), spans)


def verify_ids(asked: Asked, ids: Sequence[int]) -> npt.NDArray[np.int64]:
    """Verify that all ids are in the vocabulary."""
    try:
        wide: npt.NDArray[np.int64] = np.frombuffer(struct.pack(f"{len(ids)}q", *ids), np.int64)
    except struct.error:
        wide = np.fromiter(ids, np.int64, len(ids))  # at twice the price; beyond 64 bits it raises
    # As unsigned, a negative id exceeds every vocabulary: one pass, not two.
    if wide.size and np.maximum.reduce(wide.view(np.uint64)) >= asked.vocab_size:
        position = int(((wide < 0) | (wide >= asked.vocab_size)).argmax())
        refuse(asked, f"output id {wide[position]} at {position} is outside the vocabulary (0..{asked.vocab_size - 1})")
    return wide


def verify_scores(
    asked: Asked, scored: Scored, version: str, top: Sequence[Sequence[ScoredToken]] | None = None
) -> PromptLogprobs:
    """Verify the logprobs of the input from `prompt_logprobs_from` on."""
    start = asked.request.prompt_logprobs_from
    assert start is not None
    ids = asked.request.input_ids[start:].tolist()
    if len(scored) != len(ids):
        refuse(asked, f"{len(scored)} logprobs for the {len(ids)} input tokens from {start} on")
    require_settled(version)
    logprobs = _verify_logprobs(asked, "input", ids, scored, offset=start)
    return PromptLogprobs(start, logprobs, version, top=None if top is None else _verify_top(asked, top, len(ids)))


def abort_unsent(asked: Asked) -> GenerationResult:
    """Return the result of a request aborted before it was sent."""
    return GenerationResult(
        request_id=asked.request.request_id,
        input_ids=asked.request.input_ids,
        output_ids=as_ids(()),
        logprobs=as_logprobs(()),
        finish_reason=FinishReason.ABORT,
        version_spans=(),
    )


def read_base64(asked: Asked, encoded: msgspec.Raw) -> bytes | None:
    """Decode base64 text of a reply's JSON; None for null."""
    try:
        from pybase64 import b64decode  # ten times as fast
    except ModuleNotFoundError:  # of the extra `run`
        from base64 import b64decode  # type: ignore[assignment]  # its other arguments have other types
    try:
        return None if encoded == msgspec.Raw(b"null") else b64decode(memoryview(encoded)[1:-1], validate=True)
    except ValueError as error:
        refuse(asked, f"routed experts that are no base64: {error}")


def refuse(asked: Asked, claim: str) -> NoReturn:
    """Raise `EngineReplyInvalid` with `claim`: given and expected values."""
    raise EngineReplyInvalid(
        f"{asked.name}: the reply gives {claim}; nothing of it is used, check the version and the options of the server"
    )


def _verify_logprobs(asked: Asked, side: str, ids: Sequence[int], scored: Scored, *, offset: int = 0) -> Logprobs:
    named, values = scored.named, scored.logprobs
    # Fast path: for the few tokens of a stream's piece, numpy calls cost more than their work.
    if [*named] == [*ids] and (
        not values.size or (np.minimum.reduce(values) > -np.inf and np.maximum.reduce(values) <= _ROUNDING)
    ):
        return as_logprobs(np.minimum(values, 0.0))
    for wrong, what in (  # comparisons with NaN are false
        (np.asarray(named) != np.asarray(ids), "is given for id {named}"),
        (np.isnan(values), "is missing or not a number"),
        (np.isinf(values) | (values > _ROUNDING), "is {value}, expected a finite number up to 0"),
    ):
        if wrong.any():
            at = int(wrong.argmax())
            problem = what.format(named=named[at], value=values[at])
            refuse(asked, f"the logprob of {side} token {ids[at]} at {offset + at} {problem}")
    raise AssertionError("what is wrong has a name")


def _verify_spans(asked: Asked, spans: Sequence[VersionSpan], size: int) -> tuple[VersionSpan, ...]:
    covered = 0
    for span in spans:
        if span.start != covered or span.end < span.start:
            refuse(asked, f"a version span {span.start}..{span.end}, expected one that starts at {covered}")
        require_settled(span.version)
        covered = span.end
    if covered != size:
        refuse(asked, f"version spans that end at {covered} for an output of {size} tokens")
    return tuple(VersionSpan(span.version, span.start, span.end) for span in spans if span.end > span.start)


def _verify_top(asked: Asked, top: Sequence[Sequence[ScoredToken]], size: int) -> TopLogprobs | None:
    count = asked.request.params.top_logprobs
    if not count:
        return None
    if len(top) != size:
        refuse(asked, f"alternatives for {len(top)} tokens, expected {size}")
    with_logprob = ([token for token in row if token.logprob is not None] for row in top)
    rows = [sorted(row, key=lambda token: -(token.logprob or 0.0))[:count] for row in with_logprob]
    short = next((i for i, row in enumerate(rows) if len(row) < count), None)
    if short is not None:
        refuse(asked, f"{len(rows[short])} alternatives with a logprob at {short}, expected {count}")
    ids: npt.NDArray[np.int32] = np.asarray([[token.token_id for token in row] for row in rows], dtype=np.int32)
    values = np.asarray([[token.logprob for token in row] for row in rows], dtype=np.float32)
    return TopLogprobs(ids.reshape(size, count), values.reshape(size, count))


def _verify_prompt(asked: Asked, reply: EngineReply, reason: FinishReason) -> PromptLogprobs | None:
    if asked.request.prompt_logprobs_from is None:
        return None
    if reply.prompt_scored is None:
        # An abort can precede the reading of the prompt.
        if reason is FinishReason.ABORT and not reply.output_ids:
            return None
        refuse(asked, f"no logprobs of the input, which were asked for from {asked.request.prompt_logprobs_from} on")
    return verify_scores(asked, reply.prompt_scored, reply.version)


def _verify_rows(asked: Asked, rows: npt.NDArray[np.integer[Any]] | None, size: int) -> TokenRows | None:
    start, router = asked.request.rows_from, asked.router
    if rows is None or start is None or router is None:
        return None
    expected = (int(asked.request.input_ids.size) + size - 1 - start, router.layers, router.top_k)
    if rows.shape != expected:
        refuse(asked, f"routed experts of shape {list(rows.shape)} from position {start} on, expected {list(expected)}")
    # As in `verify_ids`: one pass.
    if rows.size and rows.view(rows.dtype.str.replace("i", "u")).max() >= router.experts:
        refuse(asked, f"expert ids {rows.min()}..{rows.max()}, expected 0..{router.experts - 1}")
    return TokenRows(start, rows.astype(router.dtype, copy=False))


def _read_masks(asked: Asked, reply: EngineReply) -> RaggedRows | None:
    # `engines.recorded_rows` checks them. A server may return some that were not asked for.
    if not asked.request.params.sampling_mask:
        return None
    masks = reply.masks if asked.wants_masks else [[token_id] for token_id in reply.output_ids]
    return None if masks is None else RaggedRows.of(int(asked.request.input_ids.size), masks)


def _require_equal(asked: Asked, what: str, expected: object, found: object) -> None:
    if expected != found:
        refuse(asked, f"{what} as {found}, expected {expected}")

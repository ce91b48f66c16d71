"""SGLang's native `/generate`: builds requests and reads replies. Pure; `reply` verifies.

Facts of SGLang 0.5.23:

- logprob entries are `[logprob, id, text]`;
- the first scored input token's entry is always null, so scoring from k requests k-1 and drops one;
- `weight_versions` and `routed_experts` come with the last chunk;
- each chunk of a stream repeats the whole output unless the server runs `--incremental-streaming-output`, and an abort
  in the queue repeats the last id even then. The claimed count shows what is new.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import prod
from operator import itemgetter
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from harness.engines.remote.http_bodies import error_for_status, error_in_event
from harness.engines.remote.reply import (
    Asked,
    EngineReply,
    Scored,
    ScoredToken,
    read_base64,
    refuse,
    verify_ids,
    verify_tokens,
)
from harness.errors import EngineConnectionLost, EngineReplyInvalid
from harness.samples.versions import is_unsettled
from harness.types import FinishReason, GenerationDelta, Json, SamplingParams, VersionSpan

TokenId = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
Entry = tuple[float | None, TokenId, str | None]

_EXPERT_BYTES = 4  # int32


class Finish(msgspec.Struct):
    type: str
    matched: int | str | list[int] | None = None
    message: str | None = None
    status_code: int | None = None
    repeat_terminate: int | None = None
    """0 or 1 from the repeat guard; None without a guard."""
    repeat_probe: str | None = None
    """Digest of the guard's configuration, if requested."""


class MetaInfo(msgspec.Struct):
    id: str
    completion_tokens: int
    finish_reason: Finish | None = None
    weight_version: str = ""
    weight_versions: list[VersionSpan] | None = None
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    e2e_latency: float = 0.0
    input_token_logprobs: list[Entry] | None = None
    input_top_logprobs: list[list[Entry] | None] | None = None
    output_token_logprobs: list[Entry] | None = None
    output_top_logprobs: list[list[Entry] | None] | None = None
    routed_experts: msgspec.Raw = msgspec.Raw(b"null")
    """Expert ids in C order, without shape and dtype, in base64."""
    output_token_sampling_mask: list[list[TokenId]] | None = None
    output_token_sampling_logprobs: list[float] | None = None
    """Over the mask, after temperature."""


class SGLangReply(msgspec.Struct):
    """Whole reply, or one chunk of a stream."""

    meta_info: MetaInfo | None = None
    output_ids: list[TokenId] = []
    error: Any = None

    @property
    def is_finished(self) -> bool:
        return self.meta_info is not None and self.meta_info.finish_reason is not None


class ModelInfo(msgspec.Struct):
    """`/model_info`."""

    model_path: str
    weight_version: str = "default"


class ServerInfo(msgspec.Struct):
    """`/server_info`."""

    max_req_input_len: int
    """Longest accepted input; a few tokens less than the context."""
    engine: str = "sglang"
    """Engine behind the protocol; SGLang itself does not report one."""
    grammar_backend: str | None = None
    """`none` if outputs can follow no schema."""
    incremental_streaming_output: bool = False
    """True if chunks hold only what is new."""
    sampling_mask_max_tokens: int = 0
    """Most candidates of a token; 0 if the server knows no masks."""
    version: str = "of unknown version"
    dp_size: int = 1


class Load(msgspec.Struct):
    """Load of one data-parallel rank."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0


class Loads(msgspec.Struct):
    """`/v1/loads`."""

    loads: list[Load]


class UpdateAnswer(msgspec.Struct):
    """`/update_weights_from_disk`."""

    success: bool
    message: str = ""


def generate_body(asked: Asked, *, interval: int | None) -> list[bytes | memoryview]:
    """Build the body of `POST /generate` in parts; `interval` in tokens makes it a stream."""
    start = asked.request.prompt_logprobs_from
    custom = {"custom_params": asked.plugin_arguments} if asked.plugin_arguments else {}
    fields = {
        "rid": asked.request.request_id,
        "sampling_params": _sampling(asked.request.params) | custom | _interval(interval),
        "return_logprob": True,
        "logprob_start_len": -1 if start is None else start - 1,
        "top_logprobs_num": asked.request.params.top_logprobs,
        "stream": interval is not None,
    }
    return asked.write_body(fields | _rank(asked) | _rows(asked), "input_ids")


def score_body(asked: Asked) -> Json:
    """Build the body of a `POST /generate` that samples nothing."""
    start = asked.request.prompt_logprobs_from
    assert start is not None
    return {
        "rid": asked.request.request_id,
        "input_ids": asked.request.input_ids.tolist(),
        "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": start - 1,
        "top_logprobs_num": asked.request.params.top_logprobs,
    } | _rank(asked)


def _rank(asked: Asked) -> Json:
    return {} if asked.rank is None else {"routed_dp_rank": asked.rank}


def _rows(asked: Asked) -> Json:
    start = asked.request.rows_from
    experts = {} if start is None else {"return_routed_experts": True, "routed_experts_start_len": start}
    return experts | ({"return_sampling_mask": True} if asked.wants_masks else {})


def read_reply(asked: Asked, reply: SGLangReply) -> EngineReply:
    """Convert a whole reply. Raises the error that it reports."""
    meta = _meta(asked, reply)
    finish = meta.finish_reason or refuse(asked, "no finish reason")
    if finish.status_code is not None:
        error = error_for_status(finish.status_code, f"{asked.name}: {finish.message}")
        error.may_have_sampled |= meta.completion_tokens > 0  # a running request can time out too
        raise error
    # An abort may precede the scheduler, so it alone may lack the guard's mark.
    if asked.is_guarded and finish.repeat_terminate is None and finish.type != FinishReason.ABORT:
        refuse(asked, "no repeat_terminate in its finish reason, so the repeat guard that was there at connect is gone")
    scored, masks = _read_entries(meta.output_token_logprobs or ()), meta.output_token_sampling_mask
    if asked.wants_masks and masks is not None:  # raw logprobs next to masks would be of another distribution
        over_masks = meta.output_token_sampling_logprobs or ()
        if len(over_masks) != len(reply.output_ids):
            refuse(asked, f"{len(over_masks)} logprobs over sampling masks for {len(reply.output_ids)} output tokens")
        scored = Scored.of(reply.output_ids, over_masks)
    spans = meta.weight_versions or ()
    return EngineReply(
        output_ids=reply.output_ids,
        scored=scored,
        masks=masks,
        finish_reason=FinishReason.REPEAT if finish.repeat_terminate == 1 else finish.type,
        request_id=meta.id,
        version_spans=spans,
        version=spans[0].version if spans else meta.weight_version,
        completion_tokens=meta.completion_tokens,
        prompt_tokens=meta.prompt_tokens,
        matched_stop=finish.matched if isinstance(finish.matched, int | str) else None,
        top=_read_top(meta.output_top_logprobs),
        prompt_scored=_read_prompt(asked, meta),
        cached_tokens=meta.cached_tokens,
        rows=_read_rows(asked, meta.routed_experts, len(reply.output_ids)),
        has_lost_tokens=_was_retracted(meta),
        seconds=meta.e2e_latency,
    )


class StreamedReply:
    """Accumulates the chunks of one stream.

    Version spans come only with the last chunk. While chunks carry the `label` from before the request, no other
    weights can have sampled anything.
    """

    def __init__(self, asked: Asked, label: str) -> None:
        self._asked = asked
        self._label = label
        self._is_under_label = not is_unsettled(label)
        self._labeled = 0  # tokens, from the first on
        self._ids: list[int] = []
        self._entries: list[Entry] = []
        self._top: list[list[Entry] | None] = []
        self._prompt: list[Entry] | None = None
        self._last: SGLangReply | None = None
        self._ends: list[int] = []  # of the chunks
        self._said = self._told = 0

    def add(self, chunk: SGLangReply) -> None:
        meta = _meta(self._asked, chunk)
        self._last = chunk
        self._prompt = meta.input_token_logprobs or self._prompt
        new = self._new_tokens(meta.completion_tokens, chunk.output_ids)
        if not new:
            return
        entries = meta.output_token_logprobs or []
        if len(entries) != len(chunk.output_ids):
            refuse(self._asked, f"{len(chunk.output_ids)} output ids but {len(entries)} logprobs in a chunk")
        self._ids += chunk.output_ids[-new:]
        self._entries += entries[-new:]
        self._top += (meta.output_top_logprobs or [])[-new:]
        self._is_under_label &= meta.weight_version == self._label
        self._ends.append(len(self._ids))
        if self._is_under_label:
            self._labeled = len(self._ids)

    def new_ids(self) -> list[int]:
        """Return the ids added since the last call, verified against the vocabulary."""
        new = self._ids[self._said :]
        self._said = len(self._ids)
        if new and not 0 <= min(new) <= max(new) < self._asked.vocab_size:  # faster than numpy for a few ids
            verify_ids(self._asked, new)
        return new

    def delta(self) -> GenerationDelta | None:
        """Return the tokens since the last delta, verified, or None."""
        begin, self._told = self._told, len(self._ids)
        return self._verify(begin, self._told) if begin < self._told else None

    def deltas(self) -> Iterator[GenerationDelta]:
        """Yield everything, verified; if a chunk is invalid, the chunks before it, then raise."""
        try:
            yield self._verify(0, len(self._ids))
        except EngineReplyInvalid:
            for begin, end in pairwise([0, *self._ends]):
                yield self._verify(begin, end)

    def _verify(self, begin: int, end: int) -> GenerationDelta:
        labeled = min(self._labeled, end)
        spans = (VersionSpan(self._label, 0, labeled),) if labeled else ()
        return verify_tokens(self._asked, self._ids[begin:end], _read_entries(self._entries[begin:end]), spans)

    def whole(self) -> EngineReply:
        """Return the complete reply. Raises the error it reports, or that it is unfinished."""
        if self._last is None or not self._last.is_finished:
            raise unfinished(self._asked)
        meta = msgspec.structs.replace(
            _meta(self._asked, self._last),
            input_token_logprobs=self._prompt,
            output_token_logprobs=self._entries,
            output_top_logprobs=self._top,
        )
        return read_reply(self._asked, SGLangReply(meta_info=meta, output_ids=self._ids))

    def _new_tokens(self, claimed: int, ids: Sequence[int]) -> int:
        new = claimed - len(self._ids)
        # The ids before the new ones must repeat known ones.
        repeated = len(ids) - new
        if new < 0 or not 0 <= repeated <= len(self._ids):
            refuse(self._asked, f"{len(ids)} ids and a count of {claimed} after {len(self._ids)} ids were streamed")
        if repeated and list(ids[:repeated]) != self._ids[len(self._ids) - repeated :]:
            refuse(self._asked, "a chunk that repeats other ids than those streamed before")
        return new


def unfinished(asked: Asked) -> EngineConnectionLost:
    """Create the error for a stream that ends without a reason."""
    return EngineConnectionLost(f"{asked.engine}: the stream of request {asked.request.request_id} ended unfinished")


def read_stream(asked: Asked, payloads: Sequence[bytes], decode: Callable[[bytes], SGLangReply]) -> EngineReply:
    """Convert the reply of an ended stream. Raises the error that it reports."""
    last = decode(payloads[-1]) if payloads else SGLangReply()
    if not last.is_finished and last.error is None:
        raise unfinished(asked)
    # If the last chunk repeats everything, the others need not be read.
    if last.meta_info is not None and last.meta_info.completion_tokens == len(last.output_ids):
        return read_reply(asked, last)
    streamed = StreamedReply(asked, "")
    for chunk in (*map(decode, payloads[:-1]), last):
        streamed.add(chunk)
    return streamed.whole()


def read_prompt_scores(asked: Asked, reply: SGLangReply) -> tuple[Scored, list[list[ScoredToken]], str]:
    """Return the logprobs of a scoring request, the most likely tokens, and their version."""
    meta = _meta(asked, reply)
    if meta.id != asked.request.request_id:
        refuse(asked, f"the request id as {meta.id}")
    scored = _read_prompt(asked, meta)
    if scored is None:
        refuse(asked, "no logprobs of the input")
    return scored, _read_top(meta.input_top_logprobs)[1:], meta.weight_version


def read_guard(asked: Asked, reply: SGLangReply) -> str | None:
    """Return the digest of the guard that ended a probe, or None."""
    finish = _meta(asked, reply).finish_reason
    return finish.repeat_probe if finish else None


def _read_rows(asked: Asked, encoded: msgspec.Raw, size: int) -> npt.NDArray[np.int32] | None:
    start, router = asked.request.rows_from, asked.router
    if start is None or router is None or not size or (data := read_base64(asked, encoded)) is None:
        return None
    tokens = int(asked.request.input_ids.size) + size - 1 - start
    shape = (tokens, router.layers, router.top_k)
    if len(data) != prod(shape) * _EXPERT_BYTES:
        refuse(
            asked,
            f"{len(data)} bytes of routed experts, expected {tokens} tokens x {router.layers} layers x {router.top_k}"
            f" experts x {_EXPERT_BYTES} bytes",
        )
    return np.frombuffer(data, "<i4").reshape(shape)


def _was_retracted(meta: MetaInfo) -> bool:
    # A retracted request that is aborted loses all unsent tokens (I4). Only an abort in the queue omits the prompt's
    # length.
    assert meta.finish_reason is not None
    return meta.finish_reason.type == FinishReason.ABORT and meta.prompt_tokens is None and meta.completion_tokens > 0


def _meta(asked: Asked, reply: SGLangReply) -> MetaInfo:
    if reply.error is not None:
        raise error_in_event(asked.name, reply.error)
    return reply.meta_info or refuse(asked, "no meta_info")


def _interval(interval: int | None) -> Json:
    # Omitted at its default, because other servers do not know the field.
    return {"stream_interval": interval} if interval and interval > 1 else {}


def _sampling(params: SamplingParams) -> Json:
    return {
        # All parameters are stated, so that no server default applies.
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "min_p": params.min_p,
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        "sampling_seed": params.seed,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": params.min_new_tokens,
        "json_schema": params.json_schema,
        "skip_special_tokens": False,
    }


def _read_entries(entries: Sequence[Entry]) -> Scored:
    return Scored.of([*map(itemgetter(1), entries)], [*map(itemgetter(0), entries)])


def _read_top(rows: Sequence[Sequence[Entry] | None] | None) -> list[list[ScoredToken]]:
    return [[ScoredToken(token_id, logprob) for logprob, token_id, _ in row or ()] for row in rows or ()]


def _read_prompt(asked: Asked, meta: MetaInfo) -> Scored | None:
    """Read the input's logprobs. SGLang names the vocabulary's last id 0, though it scores it as itself."""
    if not meta.input_token_logprobs:
        return None
    scored, last = _read_entries(meta.input_token_logprobs[1:]), asked.vocab_size - 1
    ids = asked.request.input_ids[asked.request.prompt_logprobs_from :]
    if len(scored) != ids.size or last not in ids:
        return scored
    named = [last if pair == (0, last) else pair[0] for pair in zip(scored.named, ids.tolist(), strict=True)]
    return Scored(named, scored.logprobs)

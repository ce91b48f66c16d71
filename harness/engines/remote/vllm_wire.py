"""vLLM's two token endpoints: builds requests and reads replies. Pure; `reply` verifies.

`/inference/v1/generate` takes ids and reports version spans; it needs `--enable-scale-out`. Every server has
`/v1/completions`, which returns ids beside the text (`return_token_ids`) and in the token names of the logprobs
(`token_id:57`), without versions. A whole reply is one `VLLMPiece`, a stream many.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from harness.engines.remote.http_bodies import error_in_event
from harness.engines.remote.reply import Asked, EngineReply, Scored, ScoredToken, read_base64, refuse, verify_tokens
from harness.engines.remote.vllm_messages import (
    CompletionChoice,
    CompletionChunk,
    GenerateChoice,
    GenerateChunk,
    NamedLogprobs,
    Usage,
    decode_entries,
    decode_entry,
)
from harness.errors import EngineConnectionLost
from harness.types import FinishReason, GenerationDelta, Json, SamplingParams, TokenIds, VersionSpan
from server_patch.repeat_terminate.signals import MARK, VLLM_FINISH, probed_digest

# vLLM writes this for a logprob that is NaN, minus infinity or missing; it is read as missing.
_NO_NUMBER = -9999.0
_NAME_PREFIX = "token_id:"


@dataclass(slots=True)
class VLLMPiece:
    """One reply or chunk; a stream's pieces add up to a reply."""

    ids: list[int] = field(default_factory=list)
    named: list[int] = field(default_factory=list)
    """Token ids of the logprobs."""
    logprobs: list[float | None] = field(default_factory=list)
    top: list[Sequence[ScoredToken]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    spans: list[VersionSpan] | None = None
    """None before the last chunk, or without version support."""
    usage: Usage | None = None
    prompt_scored: list[ScoredToken] | None = None
    prompt_top: list[list[ScoredToken]] = field(default_factory=list)
    engine_id: str = ""
    rows: npt.NDArray[np.integer[Any]] | None = None
    """Expert ids, with the last chunk."""
    masks: list[list[int]] | None = None

    def add(self, other: "VLLMPiece") -> None:
        self.ids += other.ids
        self.named += other.named
        self.logprobs += other.logprobs
        self.top += other.top
        self.finish_reason = other.finish_reason or self.finish_reason
        self.stop_reason = self.stop_reason if other.stop_reason is None else other.stop_reason
        self.spans = self.spans if other.spans is None else other.spans
        self.usage = other.usage or self.usage
        self.prompt_scored = self.prompt_scored if other.prompt_scored is None else other.prompt_scored
        self.prompt_top = other.prompt_top or self.prompt_top
        self.engine_id = other.engine_id or self.engine_id
        self.rows = self.rows if other.rows is None else other.rows
        self.masks = self.masks if other.masks is None else [*(self.masks or ()), *other.masks]

    @property
    def scored(self) -> Scored:
        scored = Scored.of(self.named, self.logprobs)
        scored.logprobs[scored.logprobs == _NO_NUMBER] = np.nan
        return scored


class TokenApi(ABC):
    """One of the two endpoints."""

    path: ClassVar[str]
    kind: ClassVar[type[GenerateChunk] | type[CompletionChunk]]
    """Type of its replies and chunks."""
    reports_spans: ClassVar[bool]
    """True if its replies carry weight versions."""
    id_prefix: ClassVar[str]
    """Text before a request's id in replies and aborts."""
    abort_suffix: ClassVar[str] = ""
    """Text behind the id in aborts; vLLM silently ignores any other id."""

    @abstractmethod
    def body(self, asked: Asked, model: str, interval: int | None) -> list[bytes | memoryview]:
        """Build a request body in parts; `interval` in tokens makes it a stream."""

    def piece(self, asked: Asked, chunk: Any) -> VLLMPiece:
        """Convert a decoded reply or chunk. Raises the error that it reports."""
        if chunk.error is not None:
            raise error_in_event(asked.name, chunk.error)
        piece = VLLMPiece(usage=chunk.usage, engine_id=chunk.request_id)
        for choice in chunk.choices[:1]:
            piece.ids = choice.token_ids or []
            piece.finish_reason, piece.stop_reason = choice.finish_reason, choice.stop_reason
            self.read_choice(asked, choice, piece)
        return piece

    @abstractmethod
    def read_choice(self, asked: Asked, choice: Any, piece: VLLMPiece) -> None:
        """Read into `piece` what the endpoints write in their own ways."""


class GenerateApi(TokenApi):
    path = "/inference/v1/generate"
    kind = GenerateChunk
    reports_spans = True
    id_prefix = "generate-tokens-"

    def body(self, asked: Asked, model: str, interval: int | None) -> list[bytes | memoryview]:
        params = asked.request.params
        # A row of alternatives starts with the sampled token, so one more is requested.
        sampling = _sampling(params) | {"logprobs": params.top_logprobs + 1 if params.top_logprobs else 0}
        sampling["detokenize"] = bool(params.stop)
        sampling |= {"extra_args": asked.plugin_arguments} if asked.plugin_arguments else {}
        sampling |= _interval(interval)
        if asked.request.prompt_logprobs_from is not None:
            sampling["prompt_logprobs"] = asked.prompt_top
        if asked.request.rows_from is not None:
            sampling["routed_experts_prompt_start"] = asked.request.rows_from
        fields = {"model": model, "request_id": asked.request.request_id, "sampling_params": sampling}
        return asked.write_body(fields | _streaming(interval), "token_ids")

    def piece(self, asked: Asked, chunk: GenerateChunk) -> VLLMPiece:
        piece = super().piece(asked, chunk)
        piece.prompt_scored, piece.prompt_top = _read_prompt(asked, chunk.prompt_logprobs)
        return piece

    def read_choice(self, asked: Asked, choice: GenerateChoice, piece: VLLMPiece) -> None:
        sampled = (choice.logprobs and choice.logprobs.content) or []
        piece.named = [token.token_id for token in sampled]
        piece.logprobs = [token.logprob for token in sampled]
        if asked.request.params.top_logprobs:
            piece.top = [
                [_read_token(other.token_id, other.logprob) for other in token.top_logprobs] for token in sampled
            ]
        piece.spans = choice.weight_versions
        piece.rows = _read_rows(asked, choice.routed_experts)
        piece.masks = choice.sampling_mask


class CompletionsApi(TokenApi):
    path = "/v1/completions"
    kind = CompletionChunk
    reports_spans = False
    id_prefix = "cmpl-"
    abort_suffix = "-0"  # the prompt's index in its batch of one

    def body(self, asked: Asked, model: str, interval: int | None) -> list[bytes | memoryview]:
        top = asked.request.params.top_logprobs
        wants_prompt = {} if asked.request.prompt_logprobs_from is None else {"prompt_logprobs": asked.prompt_top}
        fields = {
            "model": model,
            "request_id": asked.request.request_id,
            "logprobs": top,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **_sampling(asked.request.params),
            **({"vllm_xargs": asked.plugin_arguments} if asked.plugin_arguments else {}),
            **wants_prompt,
            **_interval(interval),
            **_streaming(interval),
        }
        return asked.write_body(fields, "prompt")

    def read_choice(self, asked: Asked, choice: CompletionChoice, piece: VLLMPiece) -> None:
        named = choice.logprobs or NamedLogprobs()
        if len(named.tokens) != len(named.token_logprobs):
            refuse(asked, f"{len(named.tokens)} token names but {len(named.token_logprobs)} logprobs")
        piece.named = [_read_name(asked, name) for name in named.tokens]
        piece.logprobs = named.token_logprobs
        if asked.request.params.top_logprobs:
            piece.top = [
                [_read_token(_read_name(asked, name), logprob) for name, logprob in (row or {}).items()]
                for row in named.top_logprobs or ()
            ]
        piece.prompt_scored, piece.prompt_top = _read_prompt(asked, choice.prompt_logprobs)


class StreamedPieces:
    """Accumulates the chunks of one stream."""

    def __init__(self, asked: Asked, api: TokenApi) -> None:
        self.kind = api.kind
        self.whole = VLLMPiece()
        self._asked = asked
        self._api = api
        self._told = 0

    def add(self, chunk: GenerateChunk | CompletionChunk) -> None:
        """Append a chunk. Raises the error that it reports."""
        self.whole.add(self._api.piece(self._asked, chunk))

    def delta(self) -> GenerationDelta | None:
        """Return the tokens since the last delta, verified, or None."""
        begin, whole = self._told, self.whole
        self._told = len(whole.ids)
        if not whole.ids[begin:] and not whole.named[begin:]:
            return None
        new = VLLMPiece(whole.ids[begin:], whole.named[begin:], whole.logprobs[begin:])
        return verify_tokens(self._asked, new.ids, new.scored)

    def require_end(self) -> None:
        """Raise `EngineConnectionLost` if no chunk states why the request ended."""
        if self.whole.finish_reason is None:
            raise EngineConnectionLost(
                f"{self._asked.engine}: the stream of request {self._asked.request.request_id} ended unfinished"
            )


def read_piece(asked: Asked, api: TokenApi, piece: VLLMPiece, label: str) -> EngineReply:
    """Convert a complete `piece`; `label` is its version if the endpoint reports none."""
    spans = (piece.spans or []) if api.reports_spans else [VersionSpan(label, 0, len(piece.ids))]
    if not piece.engine_id.startswith(api.id_prefix):
        refuse(asked, f"the request id as {piece.engine_id!r}, expected {api.id_prefix + asked.request.request_id!r}")
    # vLLM's own repetition detection, which is never enabled here, has another reason.
    is_guard = (piece.finish_reason, piece.stop_reason) == (VLLM_FINISH, MARK)
    matched = piece.stop_reason
    if matched is None and piece.finish_reason == "stop" and piece.ids:
        matched = piece.ids[-1]  # vLLM names no stop for an end at the model's own end-of-turn id
    usage = piece.usage
    cached = ((usage and usage.prompt_tokens_details) or {}).get("cached_tokens")
    return EngineReply(
        output_ids=piece.ids,
        scored=piece.scored,
        finish_reason=FinishReason.REPEAT if is_guard else piece.finish_reason or "none",
        request_id=piece.engine_id.removeprefix(api.id_prefix),
        version_spans=spans,
        version=spans[0].version if spans else label,
        completion_tokens=usage.completion_tokens if usage else None,
        prompt_tokens=usage.prompt_tokens if usage else None,
        matched_stop=matched,
        top=piece.top,
        prompt_scored=None if piece.prompt_scored is None else Scored.of_tokens(piece.prompt_scored),
        prompt_top=piece.prompt_top,
        cached_tokens=cached if isinstance(cached, int) else 0,
        rows=piece.rows if piece.ids else None,
        masks=piece.masks,
    )


def bound_candidates(params: SamplingParams, most: int) -> SamplingParams:
    """Return equal parameters for a server with `--return-sampling-mask`: neither greedy nor without `top_k`."""
    if not params.temperature:
        return replace(params, top_k=1, temperature=1.0)
    return replace(params, top_k=params.top_k or most)


def read_guard(piece: VLLMPiece) -> str | None:
    """Return the digest of the guard that ended a probe, or None."""
    return probed_digest(piece.stop_reason)


def _sampling(params: SamplingParams) -> Json:
    return {
        # All parameters are stated, so that no server default applies.
        "max_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "seed": params.seed,
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_tokens": params.min_new_tokens,
        "structured_outputs": None if params.json_schema is None else {"json": params.json_schema},
        "skip_special_tokens": False,
    }


def _interval(interval: int | None) -> Json:
    # Omitted at its default, because older servers do not know the field.
    return {"stream_interval": interval} if interval and interval > 1 else {}


def _streaming(interval: int | None) -> Json:
    return {"stream": False} if interval is None else {"stream": True, "stream_options": {"include_usage": True}}


def _read_token(token_id: int, logprob: float | None) -> ScoredToken:
    return ScoredToken(token_id, None if logprob == _NO_NUMBER else logprob)


def _read_name(asked: Asked, name: str) -> int:
    number = name.removeprefix(_NAME_PREFIX)
    if number == name or not number.isdecimal():
        refuse(asked, f"a token named {name!r}, expected {_NAME_PREFIX}<number>")
    return int(number)


def _read_rows(asked: Asked, encoded: msgspec.Raw) -> npt.NDArray[np.integer[Any]] | None:
    if asked.request.rows_from is None or (data := read_base64(asked, encoded)) is None:
        return None
    try:
        rows: npt.NDArray[np.integer[Any]] = np.lib.format.read_array(BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError) as error:
        refuse(asked, f"routed experts that are no .npy file: {error}")
    if rows.dtype.kind not in "iu":
        refuse(asked, "routed experts that are no integers")
    return rows


def _read_prompt(asked: Asked, content: msgspec.Raw) -> tuple[list[ScoredToken] | None, list[list[ScoredToken]]]:
    """Return the wanted tokens, and the alternatives of each if the request asks for some."""
    start = asked.request.prompt_logprobs_from
    try:
        entries = None if start is None else decode_entries(content)
        if start is None or entries is None:
            return None, []
        if len(entries) != asked.request.input_ids.size:
            refuse(asked, f"{len(entries)} prompt logprobs for {asked.request.input_ids.size} input tokens")
        # Only the wanted end is decoded. An entry without its token is read as another token's, which verification
        # refuses.
        wanted: TokenIds = asked.request.input_ids[start:]
        scored, top = [], []
        for token_id, raw in zip(wanted.tolist(), entries[start:], strict=True):
            entry = decode_entry(raw) or {}
            named = token_id if token_id in entry else next(iter(entry), token_id)
            scored.append(_read_token(named, entry[named].logprob if named in entry else None))
            if asked.request.params.top_logprobs:
                top.append([_read_token(each, said.logprob) for each, said in entry.items()])
        return scored, top
    except (msgspec.DecodeError, RecursionError) as error:
        refuse(asked, f"prompt logprobs that are none: {error}")

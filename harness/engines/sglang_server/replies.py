"""Replies of SGLang's native `/generate`. Pure.

Chunks hold only what is new, as with `--incremental-streaming-output`, and there is no `text`, as with
`--skip-tokenizer-init`. Sampling masks come with the last chunk, all of them.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, assert_never

from harness.engines.sglang_server.requests import GenerateRequest
from harness.top_logprobs import TopLogprobs
from harness.types import FinishReason, GenerationDelta, GenerationResult, Json, Logprobs, PromptLogprobs, TokenIds
from server_patch.repeat_terminate.signals import MARK, PROBE, SGLANG_MATCHED


def whole_reply(asked: GenerateRequest, result: GenerationResult, version: str, guard: str | None) -> Json:
    """Build the reply to a generation; `version` is the current weights', `guard` the guard's digest."""
    meta = closing_meta(asked, result, version, guard)
    if asked.return_logprob:
        meta |= _output_logprobs(result.output_ids, result.logprobs)
    if result.top_logprobs is not None:
        meta["output_top_logprobs"] = _rows(result.top_logprobs)
    return {"output_ids": result.output_ids.tolist(), "meta_info": meta}


def last_chunk(asked: GenerateRequest, result: GenerationResult, version: str, guard: str | None) -> Json:
    """Build the end of a stream whose tokens were all sent."""
    none = _output_logprobs(result.output_ids[:0], result.logprobs[:0]) if asked.return_logprob else {}
    return {"output_ids": [], "meta_info": closing_meta(asked, result, version, guard) | none}


def chunk(asked: GenerateRequest, delta: GenerationDelta, count: int, version: str) -> Json:
    """Build a chunk with the tokens of `delta`; `count` includes them."""
    meta: Json = {
        "id": asked.rid,
        "finish_reason": None,
        "prompt_tokens": len(asked.input_ids),
        "completion_tokens": count,
        "weight_version": version,
    }
    if asked.return_logprob:
        meta |= _output_logprobs(delta.output_ids, delta.logprobs)
    return {"output_ids": delta.output_ids.tolist(), "meta_info": meta}


def prompt_reply(asked: GenerateRequest, scores: PromptLogprobs) -> Json:
    meta: Json = {
        "id": asked.rid,
        "finish_reason": {"type": "length", "length": 0},
        "prompt_tokens": len(asked.input_ids),
        "completion_tokens": 0,
        "cached_tokens": 0,
        "weight_version": scores.version,
        "weight_versions": [],
    }
    logprobs = _prompt_logprobs(asked, scores) | {"output_token_logprobs": []} if asked.return_logprob else {}
    return {"output_ids": [], "meta_info": meta | logprobs}


def closing_meta(asked: GenerateRequest, result: GenerationResult, version: str, guard: str | None) -> Json:
    """Build the metadata of an ended generation, without tokens."""
    scores = result.prompt_logprobs
    meta: Json = {
        "id": asked.rid,
        "finish_reason": finish(result, guard) | ({PROBE: guard} if asked.probes_guard and guard else {}),
        "prompt_tokens": len(asked.input_ids),
        "completion_tokens": int(result.output_ids.size),
        "cached_tokens": result.cached_tokens,
        # If nothing was sampled, only this tells which weights read the prompt.
        "weight_version": version if scores is None else scores.version,
        "weight_versions": [
            {"version": span.version, "start": span.start, "end": span.end} for span in result.version_spans
        ],
        "e2e_latency": result.seconds,
    }
    if (masks := result.masks) is not None:
        meta["output_token_sampling_mask"] = [masks.values[a:b].tolist() for a, b in pairwise(masks.offsets)]
        meta["output_token_sampling_logprobs"] = result.logprobs.tolist()
    return meta if scores is None else meta | _prompt_logprobs(asked, scores)


def finish(result: GenerationResult, guard: str | None) -> Json:
    """Build the finish reason; with a guard it carries the guard's mark."""
    mark = {} if guard is None else {MARK: int(result.finish_reason is FinishReason.REPEAT)}
    length = {"type": "length", "length": int(result.output_ids.size)}
    match result.finish_reason:
        case FinishReason.STOP:
            return {"type": "stop", "matched": result.matched_stop} | mark
        case FinishReason.LENGTH:
            return length | mark
        case FinishReason.REPEAT:
            return length | {"matched": SGLANG_MATCHED} | mark
        case FinishReason.ABORT:
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None} | mark
        case _:
            assert_never(result.finish_reason)


def _output_logprobs(ids: TokenIds, logprobs: Logprobs) -> Json:
    return {"output_token_logprobs": _entries(ids.tolist(), logprobs.tolist())}


def _prompt_logprobs(asked: GenerateRequest, scores: PromptLogprobs) -> Json:
    # The first entry, for the token before the first scored one, never has a value.
    top = {} if scores.top is None else {"input_top_logprobs": [None, *_rows(scores.top)]}
    logprobs = [None, *scores.logprobs.tolist()]
    return {"input_token_logprobs": _entries(asked.input_ids[scores.start - 1 :], logprobs)} | top


def _rows(top: TopLogprobs) -> list[list[Any]]:
    return [_entries(ids, values) for ids, values in zip(top.ids.tolist(), top.logprobs.tolist(), strict=True)]


def _entries(ids: Sequence[int], logprobs: Sequence[float | None]) -> list[Any]:
    return [[logprob, token_id, None] for token_id, logprob in zip(ids, logprobs, strict=True)]

"""Measures whether an engine reports sampled and prompt logprobs on one scale.

Trainers divide behavior logprobs (sampled) by proximal ones (scored). SGLang applies the temperature to sampled
logprobs by default, vLLM on request, and no reply says so. So a few tokens are sampled away from temperature 1, scored
and compared.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple
from uuid import uuid4

import numpy as np

from harness.engines.base import LogprobScale, TokenProvider
from harness.errors import EngineReplyInvalid, EngineUnavailable
from harness.machine.log import get_logger
from harness.types import GenerationRequest, SamplingParams, TokenIds, as_ids

TOLERANCE = 0.25
"""Mean difference in nats: bfloat16 scoring differs by up to 0.1, a temperature of 2 by 0.5 to 1.8."""

SELF_TEST_S = 60.0
"""Seconds for all requests that test a server."""

TEMPERATURE = 2.0
"""Hot, because tokens of a certain model barely move: at 0.7, values on the wrong scale differed by 0.05 only."""
_TOKENS = 16
SCALE_UNKNOWN = "logprob_scale_unknown"

CERTAIN = (
    "the model is certain of every token after a few arbitrary prompts, so the scale of its logprobs cannot be"
    " measured: proximal values are switched off; check the weights"
)

log = get_logger(__name__)

_ENOUGH_DOUBT = 0.5  # nats: of tokens the model was sure about, both scales say nearly 0
_PROMPT_IDS = 4
_PROMPTS = 4


class ScaleMeasurement(NamedTuple):
    tokens: int
    mean_difference: float
    mean_doubt: float
    """Mean negated scored logprob; meaningless near 0."""


@asynccontextmanager
async def limit_test_time(engine: str, seconds: float) -> AsyncIterator[None]:
    """Limit the tests in the block, which a paused server never answers. Raises `EngineUnavailable`."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise EngineUnavailable(
            f"{engine} answers, but generated no token within {seconds:g} s: is it paused? The"
            " client that paused it may still use it; if not, continue it (SGLang: POST"
            " /continue_generation {}, vLLM: POST /resume, or `harness serve --continue-engines`)"
        ) from None


async def require_raw_logprobs(provider: TokenProvider, *, advice: str) -> LogprobScale:
    """Return RAW if logprobs are raw, UNKNOWN, with a warning, if the model is too certain to tell.

    Otherwise raises `EngineReplyInvalid` with `advice`, or the `EngineError` of a failed request.
    """
    measured = await measure_scale(provider)
    if measured is None:
        log.warning(SCALE_UNKNOWN, engine=provider.capabilities.engine, reason=CERTAIN)
        return LogprobScale.UNKNOWN
    if measured.mean_difference > TOLERANCE:
        raise EngineReplyInvalid(
            f"{provider.capabilities.engine}: {measured.tokens} tokens sampled at temperature {TEMPERATURE} and then"
            f" scored differ by {measured.mean_difference:.3f} nats in the mean, expected at most {TOLERANCE};"
            f" {advice}"
        )
    return LogprobScale.RAW


async def measure_scale(provider: TokenProvider) -> ScaleMeasurement | None:
    """Compare sampled and scored logprobs on the first prompt that leaves the model in doubt.

    Returns None without such a prompt: on certain tokens all scales agree. Raises `EngineUnavailable` if another client
    aborts it.
    """
    size = provider.capabilities.vocab_size
    for attempt in range(_PROMPTS):
        # Unrelated ids, spread over the vocabulary.
        prompt = [(i * size + attempt * 7919) // (_PROMPT_IDS + 1) % size for i in range(1, _PROMPT_IDS + 1)]
        measured = await _measure(provider, as_ids(prompt))
        if measured.mean_doubt >= _ENOUGH_DOUBT:
            return measured
    return None


async def _measure(provider: TokenProvider, prompt: TokenIds) -> ScaleMeasurement:
    params = SamplingParams(max_new_tokens=_TOKENS, temperature=TEMPERATURE, ignore_eos=True)
    sampled = await provider.generate(GenerationRequest(prompt, params, request_id=uuid4().hex))
    if not sampled.output_ids.size:
        raise EngineUnavailable(
            f"{provider.capabilities.engine} was tested with a request that another client aborted before its first"
            " token; try again when that client is done"
        )
    whole = as_ids(np.concatenate([sampled.input_ids, sampled.output_ids]))
    scored = await provider.score(whole, start=prompt.size)
    return ScaleMeasurement(
        tokens=sampled.output_ids.size,
        mean_difference=float(np.abs(sampled.logprobs - scored.logprobs).mean()),
        mean_doubt=float(-scored.logprobs.mean()),
    )

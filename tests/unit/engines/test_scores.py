"""Scores of an input as SGLang and vLLM write them: what looks odd and is right, and what must not count."""

from collections.abc import Callable, Sequence

import msgspec
import pytest

from harness.engines.remote.reply import Asked, Scored, verify_scores
from harness.engines.remote.sglang_wire import SGLangReply, read_prompt_scores
from harness.engines.remote.vllm_messages import GenerateChunk
from harness.engines.remote.vllm_wire import GenerateApi
from harness.errors import EngineReplyInvalid
from harness.types import GenerationRequest, PromptLogprobs, SamplingParams, as_ids

IDS, START, TOP, VOCABULARY = (5, 6, 7, 8), 2, 2, 10
Said = tuple[int, float | None]
"""An id with its logprob."""
Row = tuple[Said, Sequence[Said]]
"""A token of the input, and the most likely ones in its place."""
MOST_LIKELY: Row = ((7, -0.25), ((7, -0.25), (12, -2.0)))
UNLIKELY: Row = ((8, -3.0), ((3, -0.5), (4, -1.5)))


def asked() -> Asked:
    params = SamplingParams(max_new_tokens=1, top_logprobs=TOP)
    request = GenerationRequest(as_ids(IDS), params, "r", prompt_logprobs_from=START)
    return Asked("engine", request, VOCABULARY, is_scoring=True)


def by_sglang(rows: Sequence[Row]) -> PromptLogprobs:
    """It scores from the token before on, whose entries are null; the most likely tokens come apart."""

    def entries(said: Sequence[Said]) -> list[tuple[float | None, int, None]]:
        return [(logprob, token_id, None) for token_id, logprob in said]

    meta = {
        "id": "r",
        "completion_tokens": 0,
        "weight_version": "1",
        "input_token_logprobs": [(None, 6, None), *entries([token for token, _ in rows])],
        "input_top_logprobs": [None, *(entries(top) for _, top in rows)],
    }
    reply = msgspec.json.decode(msgspec.json.encode({"meta_info": meta}), type=SGLangReply)
    scored, top, version = read_prompt_scores(asked(), reply)
    return verify_scores(asked(), scored, version, top)


def by_vllm(rows: Sequence[Row]) -> PromptLogprobs:
    """It has an object per token of the input, null for the first: that token, and the most likely ones besides."""
    entries: list[dict[int, dict[str, float | None]] | None] = [None, {6: {"logprob": -1.0}}]
    entries += [{each: {"logprob": logprob} for each, logprob in (token, *top)} for token, top in rows]
    told = msgspec.json.encode({"request_id": "r", "prompt_logprobs": entries})
    piece = GenerateApi().piece(asked(), msgspec.json.decode(told, type=GenerateChunk))
    assert piece.prompt_scored is not None
    return verify_scores(asked(), Scored.of_tokens(piece.prompt_scored), "1", piece.prompt_top)


READERS = pytest.mark.parametrize("read", [by_sglang, by_vllm], ids=["sglang", "vllm"])
Read = Callable[[Sequence[Row]], PromptLogprobs]


@READERS
def test_a_token_is_scored_whether_it_is_among_the_most_likely_or_not(read: Read) -> None:
    """One that is comes once from vLLM, and one that is not in addition; ids that only the weights know stay."""
    scores = read([MOST_LIKELY, UNLIKELY])
    assert scores.logprobs.tolist() == [-0.25, -3.0]
    assert scores.top is not None
    assert scores.top.ids.tolist() == [[7, 12], [3, 4]]
    assert scores.top.logprobs.tolist() == [[-0.25, -2.0], [-0.5, -1.5]]


@READERS
@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([MOST_LIKELY], r"for (the 2|4) input tokens"),
        ([MOST_LIKELY, UNLIKELY, UNLIKELY], r"for (the 2|4) input tokens"),
        ([((7, None), MOST_LIKELY[1][1:]), UNLIKELY], "token 7 at 2 is missing or not a number"),
        ([((7, 0.5), MOST_LIKELY[1][1:]), UNLIKELY], "token 7 at 2 is 0.5, expected a finite number up to 0"),
        ([((9, -0.25), ((9, -0.25), (3, -2.0))), UNLIKELY], "token 7 at 2 is "),
        ([((7, -0.25), ((7, -0.25), (9, None))), UNLIKELY], "1 alternatives with a logprob at 0, expected 2"),
    ],
    ids=["prefix read from a cache", "chunk twice", "null", "positive", "another token", "null among the most likely"],
)
def test_a_score_that_is_none_does_not_count(read: Read, rows: Sequence[Row], words: str) -> None:
    """Minus infinity comes as null, a preempted chunk twice, a row that was never written with any id."""
    with pytest.raises(EngineReplyInvalid, match=words):
        read(rows)


def test_vllms_number_for_minus_infinity_is_no_score() -> None:
    with pytest.raises(EngineReplyInvalid, match="token 8 at 3 is missing or not a number"):
        by_vllm([MOST_LIKELY, ((8, -9999.0), UNLIKELY[1])])


@READERS
def test_what_rounding_puts_above_zero_is_zero(read: Read) -> None:
    """A log-softmax in float32 may end there for a token that is certain."""
    certain: Row = ((7, 1e-7), ((7, 1e-7), (9, -20.0)))
    assert read([certain, UNLIKELY]).logprobs.tolist() == [0.0, -3.0]

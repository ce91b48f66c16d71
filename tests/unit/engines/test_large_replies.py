"""Replies of many megabytes: what is wanted of them is read, off the event loop."""

import threading

import msgspec
import pytest

from harness.engines.remote.http_bodies import EventBuffer, LineTooLong
from harness.engines.remote.http_client import EngineClient
from harness.engines.remote.reply import Asked
from harness.engines.remote.vllm_messages import GenerateChunk
from harness.engines.remote.vllm_wire import GenerateApi
from harness.errors import EngineReplyInvalid
from harness.token_rows import RoutedExperts
from harness.types import GenerationRequest, SamplingParams, as_ids


def asked(tokens: int, start: int) -> Asked:
    return Asked(
        "vllm",
        GenerationRequest(as_ids(range(tokens)), SamplingParams(1), "0" * 32, prompt_logprobs_from=start),
        1 << 20,
    )


def reply(entries: list[object]) -> GenerateChunk:
    return msgspec.json.decode(msgspec.json.encode({"prompt_logprobs": entries}), type=GenerateChunk)


def test_only_the_wanted_end_of_the_prompt_s_logprobs_is_decoded():
    """A server of vLLM scores whole prompts: what comes before the wanted tokens may even be nonsense."""
    entries = [None, *[{"nonsense": True}] * 7, {"8": {"logprob": -8.5}}, {"9": {"logprob": -9.5}}]

    piece = GenerateApi().piece(asked(10, 8), reply(entries))

    assert piece.prompt_scored == [(8, -8.5), (9, -9.5)]


@pytest.mark.parametrize("entries", [[{}] * 9, [None] * 8 + [{"nonsense": 1}, {}], "none", [None] * 8 + [7, 7]])
def test_prompt_logprobs_that_make_no_sense_are_an_invalid_reply(entries):
    with pytest.raises(EngineReplyInvalid, match="prompt logprobs"):
        GenerateApi().piece(asked(10, 8), reply(entries))


async def test_a_large_reply_is_read_by_a_thread_and_a_small_one_on_the_spot():
    """Whatever reading it raises comes out where it was asked for."""
    client = EngineClient("http://127.0.0.1:1", "vllm")
    client.open()
    try:
        threads = [await client.apart(size, threading.current_thread) for size in (1_000, 10_000_000)]
        with pytest.raises(ZeroDivisionError):
            await client.apart(10_000_000, lambda: 1 // 0)
    finally:
        await client.close()

    assert [thread is threading.main_thread() for thread in threads] == [True, False]


def test_a_line_may_have_the_rows_that_were_asked_for() -> None:
    """A prompt of 26,000 tokens of a model with 61 layers has more of them than any other line may have bytes."""
    router, budget = RoutedExperts(layers=61, top_k=8, experts=256), SamplingParams(max_new_tokens=100)
    asked = Asked(
        "sglang", GenerationRequest(as_ids(range(26_000)), budget, "0" * 32, rows_from=0), 1 << 20, router=router
    )
    line = b"data: " + b"A" * (26_099 * 61 * 8 * 4 * 4 // 3)

    assert EventBuffer(asked.row_bytes).feed(line) == []
    with pytest.raises(LineTooLong):
        EventBuffer().feed(line)

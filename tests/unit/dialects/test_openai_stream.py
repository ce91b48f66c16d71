"""A streamed answer adds up to the completion it was made from."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from harness.dialects.model_request import AnswerHead, ModelAnswer, WireCall
from harness.dialects.openai_chat import DONE, OpenAIChat, chunks
from harness.dialects.openai_chat_request import parse_request
from harness.dialects.sse import event
from tests.builders import body, new_session, take_turn, toy_tokenizer, user

USAGE = {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}
LOGPROBS = {"content": [{"token": "a", "bytes": [97], "logprob": -0.5, "top_logprobs": []}]}

texts = st.text(max_size=400)
calls = st.builds(
    lambda name, arguments: {
        "id": f"call_{name}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    },
    st.text(min_size=1, max_size=5),
    texts,
)


@st.composite
def messages(draw: st.DrawFn) -> dict[str, Any]:
    """Assistant messages as a server gives them."""
    message: dict[str, Any] = {"role": "assistant", "content": draw(texts)}
    if reasoning := draw(texts):
        message["reasoning_content"] = reasoning
    if tool_calls := draw(st.lists(calls, max_size=3)):
        message |= {"tool_calls": tool_calls, "content": message["content"] or None}
    return message


def completion(message: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A `chat.completion` with `message`."""
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": LOGPROBS}
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m"}
    return head | {"choices": [choice], "usage": USAGE} | more


def choices_of(whole: dict[str, Any], *, wants_usage: bool = False) -> list[dict[str, Any]]:
    """The choices of all chunks."""
    return [choice for chunk in chunks(whole, wants_usage=wants_usage) for choice in chunk["choices"]]


@given(message=messages())
def test_only_the_last_choice_says_how_it_finished(message):
    """With the logprobs of the whole output."""
    choices = choices_of(completion(message))

    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert [choice["logprobs"] for choice in choices] == [None] * (len(choices) - 1) + [LOGPROBS]


@pytest.mark.parametrize("length", [1_000, 1_000_001])
def test_a_long_text_comes_in_several_deltas_and_not_in_many(length):
    """So that who shows it has something to show, and who parses it is soon done."""
    message = {"role": "assistant", "content": "x" * length}

    assert 5 < len(choices_of(completion(message))) < 50


@pytest.mark.parametrize("wants_usage", [True, False])
def test_usage_comes_last_and_only_if_it_is_wanted(wants_usage):
    """In a chunk without choices; null in those before."""
    *others, last = chunks(completion({"role": "assistant", "content": "hi"}), wants_usage=wants_usage)

    assert [chunk.get("usage", "absent") for chunk in others] == [None if wants_usage else "absent"] * len(others)
    assert (last["choices"] == [], last.get("usage", "absent")) == (wants_usage, USAGE if wants_usage else "absent")


def test_every_chunk_belongs_to_the_completion_and_its_further_keys_are_said_once():
    """Id, time and model in each."""
    given_chunks = list(chunks(completion({"role": "assistant", "content": "hi"}, harness={"x": 1}), wants_usage=True))

    heads = [(chunk["id"], chunk["object"], chunk["created"], chunk["model"]) for chunk in given_chunks]
    assert heads == [("chatcmpl-1", "chat.completion.chunk", 1, "m")] * len(given_chunks)
    assert [chunk["harness"] for chunk in given_chunks if "harness" in chunk] == [{"x": 1}]


@given(message=messages())
def test_a_body_is_lines_of_json_up_to_done_for_every_way_to_split_lines(message):
    """Also for clients that split decoded text, where more characters end a line."""
    turn = structs.replace(take_turn(new_session(), [user("hi")]), reply=message)
    request = parse_request(WireCall(body([user("hi")], stream=True)))
    answer = ModelAnswer(request, turn, "m", toy_tokenizer().token_text)

    sent = b"".join(OpenAIChat().stream(AnswerHead(request, "1", "m", 1.0)).end(answer))

    data = [line.removeprefix("data: ") for line in sent.decode().splitlines() if line]
    assert sent.endswith(DONE)
    assert data[-1] == "[DONE]"
    assert [json.loads(line) for line in data[:-1]] == list(chunks(OpenAIChat().answer(answer), wants_usage=False))


def test_line_ends_of_unicode_are_escaped():
    """The data of an event stays one line."""
    assert event({"a": "\x85\u2028\n\u2029"}) == b'data: {"a":"\\u0085\\u2028\\n\\u2029"}\n\n'
    assert event({}, "ping") == b"event: ping\ndata: {}\n\n"

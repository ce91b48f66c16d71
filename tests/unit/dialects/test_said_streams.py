"""A stream that has said text of a turn in the making adds up to the same message as one that has not."""

import json
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from harness.dialects.anthropic_messages import AnthropicMessages
from harness.dialects.model_request import AnswerHead, ModelAnswer, WireCall
from harness.dialects.openai_chat import OpenAIChat
from harness.dialects.openai_chat_request import parse_request
from harness.types import Json, TurnNotes
from tests.builders import body, new_session, take_turn, toy_tokenizer, user
from tests.unit.dialects.said import said_of
from tests.unit.dialects.test_openai_responses import RESPONSE_ID, replies
from tests.unit.dialects.test_openai_stream import added_up


def answered(reply: Json) -> ModelAnswer:
    """An answer with that reply."""
    turn = replace(take_turn(new_session(), [user("hi")]), reply=reply, notes=TurnNotes(response_id=RESPONSE_ID))
    return ModelAnswer(parse_request(WireCall(body([user("hi")], stream=True))), turn, "m", toy_tokenizer().token_text)


def stream_of(dialect: Any, answer: ModelAnswer, said: Any) -> list[Json]:
    """The events of a stream that has said something before the end."""
    stream = dialect.stream(AnswerHead(answer.request, RESPONSE_ID, "m", answer.turn.created_at))
    sent = b"".join([*(stream.say(delta) for delta in said), *stream.end(answer)]).decode()
    lines = [line.removeprefix("data: ") for line in sent.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@given(reply=replies(), data=st.data())
def test_chunks_add_up_to_the_message(reply, data):
    """Empty and missing content told apart."""
    chunks = stream_of(OpenAIChat(), answered(reply), data.draw(said_of(reply)))

    assert added_up([choice["delta"] for chunk in chunks for choice in chunk["choices"]]) == reply
    assert len({chunk["id"] for chunk in chunks}) == 1


@given(reply=replies(), data=st.data())
def test_blocks_add_up_to_the_message(reply, data):
    """One after the other: a block ends before the next one begins."""
    answer = answered(reply)
    events = stream_of(AnthropicMessages(), answer, data.draw(said_of(reply)))

    assert [event["type"] for event in events].count("message_start") == 1
    blocks: list[Json] = []
    inputs: list[str] = []
    is_open = False
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(blocks)
                blocks.append(event["content_block"])
                inputs.append("")
                is_open = True
            case "content_block_stop":
                assert is_open
                assert event["index"] == len(blocks) - 1
                is_open = False
            case "content_block_delta":
                assert is_open
                for field, text in event["delta"].items():
                    if field == "partial_json":
                        inputs[-1] += text
                    elif field != "type":
                        blocks[-1][field] += text
    for block, text in zip(blocks, inputs, strict=True):
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
    whole = AnthropicMessages().answer(answer)["content"]
    read = [block | ({"input": json.loads(bytes(block["input"]))} if "input" in block else {}) for block in whole]
    assert blocks == read

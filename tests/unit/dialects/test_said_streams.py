"""A stream that has said text of a turn in the making adds up to the same message as one that has not."""

import json
import re
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from harness.dialects.anthropic_messages import AnthropicMessages
from harness.dialects.model_request import AnswerHead, ModelAnswer, WireCall
from harness.dialects.openai_chat import OpenAIChat
from harness.dialects.openai_chat_request import parse_request
from harness.types import Json, TurnNotes
from tests.builders import body, new_session, take_turn, toy_tokenizer, user
from tests.dialects.speakers import SPEAKERS, gather_blocks
from tests.thoroughness import examples
from tests.unit.dialects.said import said_of
from tests.unit.dialects.test_openai_responses import RESPONSE_ID, replies


def answered(reply: Json) -> ModelAnswer:
    """An answer with that reply."""
    turn = structs.replace(
        take_turn(new_session(), [user("hi")]), reply=reply, notes=TurnNotes(response_id=RESPONSE_ID)
    )
    return ModelAnswer(parse_request(WireCall(body([user("hi")], stream=True))), turn, "m", toy_tokenizer().token_text)


def stream_of(dialect: Any, answer: ModelAnswer, said: Any) -> list[Json]:
    """The events of a stream that has said something before the end."""
    stream = dialect.stream(AnswerHead(answer.request, RESPONSE_ID, "m", answer.turn.created_at))
    sent = b"".join([*(stream.say(delta) for delta in said), *stream.end(answer)]).decode()
    lines = [line.removeprefix("data: ") for line in sent.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@settings(max_examples=examples(40))
@given(reply=replies(), data=st.data())
def test_chunks_add_up_to_the_message(reply, data):
    """Empty and missing content told apart."""
    chunks = stream_of(OpenAIChat(), answered(reply), data.draw(said_of(reply)))

    assert SPEAKERS[0].gather(chunks)["choices"][0]["message"] == reply
    assert len({chunk["id"] for chunk in chunks}) == 1


@settings(max_examples=examples(40))
@given(reply=replies(), data=st.data())
def test_blocks_add_up_to_the_message(reply, data):
    """One after the other: a block ends before the next one begins."""
    answer = answered(reply)
    events = stream_of(AnthropicMessages(), answer, data.draw(said_of(reply)))

    assert [event["type"] for event in events].count("message_start") == 1
    kinds = [event["type"].removeprefix("content_block_") for event in events if "content_block" in event["type"]]
    assert re.fullmatch("(start (delta )*stop )*", "".join(f"{kind} " for kind in kinds))
    whole = AnthropicMessages().answer(answer)["content"]
    read = [block | ({"input": json.loads(bytes(block["input"]))} if "input" in block else {}) for block in whole]
    assert gather_blocks(events)["content"] == read

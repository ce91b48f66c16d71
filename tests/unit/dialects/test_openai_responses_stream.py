"""A streamed response adds up to the whole one, and every event of it is one that clients know."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.dialects.model_request import AnswerHead, ModelAnswer
from harness.dialects.openai_responses import OpenAIResponses
from harness.errors import EngineUnavailable
from harness.tokens.parsing import Delta
from harness.turn_ends import TurnEnd
from harness.types import Json
from tests.builders import assistant
from tests.thoroughness import examples
from tests.unit.dialects.said import said_of
from tests.unit.dialects.test_openai_responses import RESPONSE_ID, answered, calls_of, replies

DIALECT = OpenAIResponses()


def events_of(stream: bytes) -> list[Json]:
    """The events, each of which has the name that it says itself."""
    parts = stream.decode().split("\n\n")
    assert parts.pop() == ""
    events = []
    for part in parts:
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def stream_of(answer: ModelAnswer, keep_alives: int = 0, said: Sequence[Delta] = ()) -> list[Json]:
    """The whole stream, with the parts that have kept it alive and the text that was said while it was sampled."""
    stream = DIALECT.stream(AnswerHead(answer.request, answer.response_id, answer.model, answer.turn.created_at))
    before = [stream.keep_alive() for _ in range(keep_alives)] + [stream.say(delta) for delta in said]
    return events_of(b"".join([*before, *stream.end(answer)]))


def added_up(events: list[Json]) -> list[Json]:
    """The items that a client has which believes nothing but deltas."""
    items: list[Json] = []
    for event in events:
        match event["type"].removeprefix("response.").split("."):
            case ["output_item", "added"]:
                assert event["output_index"] == len(items)
                items.append(event["item"])
            case ["content_part", "added"]:
                items[event["output_index"]]["content"].append(event["part"])
            case ["output_text" | "reasoning_text", "delta"]:
                items[event["output_index"]]["content"][event["content_index"]]["text"] += event["delta"]
            case ["function_call_arguments", "delta"]:
                items[event["output_index"]]["arguments"] += event["delta"]
            case ["custom_tool_call_input", "delta"]:
                items[event["output_index"]]["input"] += event["delta"]
    return items


def with_every_item_done(items: list[Json], whole: list[Json]) -> list[Json]:
    """The same, with what is known of an item only when it is done."""
    late = ("status", "encrypted_content")
    return [item | {name: done[name] for name in late if name in done} for item, done in zip(items, whole, strict=True)]


@settings(max_examples=examples(40))
@given(reply=replies(), keep_alives=st.integers(0, 3), data=st.data())
def test_the_deltas_add_up_to_the_items(reply, keep_alives, data):
    """Character for character, also those that were said before all was known; each item is whole when it is done."""
    answer = answered(reply)
    whole = DIALECT.answer(answer)

    events = stream_of(answer, keep_alives, data.draw(said_of(reply)))

    assert with_every_item_done(added_up(events), whole["output"]) == whole["output"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == whole["output"]


@settings(max_examples=examples(40))
@given(
    reply=replies(), keep_alives=st.integers(0, 3), end=st.sampled_from([TurnEnd.MODEL, TurnEnd.LENGTH]), data=st.data()
)
def test_events_are_numbered_and_the_last_one_says_how_it_ended(reply, keep_alives, end, data):
    """However often the stream had to be kept alive before, and whatever was said."""
    answer = answered(reply, end=end)

    events = stream_of(answer, keep_alives, data.draw(said_of(reply)))

    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert {event["response"]["id"] for event in events if "response" in event} == {f"resp_{RESPONSE_ID}"}
    ends = [event for event in events if event["type"] in ("response.completed", "response.incomplete")]
    assert ends == events[-1:]
    assert events[-1]["response"] == DIALECT.answer(answer)


def test_every_part_of_a_stream_is_there():
    """In the order in which clients expect it."""
    calls = calls_of(("add", "{}"), ("apply_patch", '{"input": "x"}'))
    reply = {**assistant("so"), "reasoning_content": "hm", "tool_calls": calls}

    assert [event["type"].removeprefix("response.") for event in stream_of(answered(reply))] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
        "completed",
    ]


@pytest.mark.parametrize("keep_alives", [0, 1, 3])
def test_a_failure_is_the_end_of_the_response_that_has_begun(keep_alives):
    """Under its id, behind what was sent of it."""
    answer = answered(assistant(""))
    stream = DIALECT.stream(AnswerHead(answer.request, RESPONSE_ID, "m", 1.0))
    sent = events_of(b"".join(stream.keep_alive() for _ in range(keep_alives)))

    *before, failed = events_of(stream.fail(EngineUnavailable("gone"), "no engine"))

    assert bool(before) == (not keep_alives)
    assert failed["sequence_number"] == len(sent) + len(before)
    assert (failed["type"], failed["response"]["id"]) == ("response.failed", f"resp_{RESPONSE_ID}")
    assert (failed["response"]["status"], failed["response"]["error"]) == (
        "failed",
        {"code": "engine_unavailable", "message": "no engine"},
    )

"""Anthropic Messages over HTTP: branches, streams, counting, errors."""

import asyncio
import json
import re
from typing import Any

import httpx
import pytest

from harness.engines.scripted import ScriptStep
from harness.server.settings import ServerSettings
from harness.types import FinishReason, Json
from tests.builders import user
from tests.dialects.speakers import gather_blocks
from tests.session_servers.served import Client, Served, says, serving, session_on

CALL = 'Sure.<tool_call>\n{"name": "add", "arguments": {"a": 2.0, "b": "x"}}\n</tool_call>'
TOOL: Json = {"name": "add", "input_schema": {"type": "object"}}
HI = [user("hi")]


async def ask(client: Client, session: Served, messages: Any = HI, path: str = "", **fields: Any) -> httpx.Response:
    """A call, or another question below its route."""
    content = {"model": "m", "max_tokens": 200, "messages": messages, **fields}
    url = f"/sessions/{session.session_id}/v1/messages{path}?beta=true"
    return await client.http.post(url, json=content, headers={"x-api-key": session.api_key})


def events_of(stream: httpx.Response) -> list[Json]:
    """The events; each has the name of its type."""
    parts = [part.split("\n") for part in stream.text.split("\n\n") if part]
    events = [json.loads(data.removeprefix("data: ")) for _, data in parts]
    assert [name for name, _ in parts] == [f"event: {event['type']}" for event in events]
    return events


async def test_a_tool_loop_is_one_branch():
    """Arguments come back with other spellings; a failed result says so in the record."""
    async with session_on(*says(CALL, "It is 5.")) as (client, session):
        reply = (await ask(client, session, tools=[TOOL], system="be")).json()
        use = reply["content"][1]
        history = [
            *HI,
            {"role": "assistant", "content": [reply["content"][0], use | {"input": {"b": "x", "a": 2}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use["id"], "is_error": True}]},
        ]
        last = await ask(client, session, history, tools=[TOOL], system=[{"type": "text", "text": "be"}])
        record = await client.record(session)
        samples = await client.samples(session)

    assert (reply["stop_reason"], use["name"], use["input"]) == ("tool_use", "add", {"a": 2.0, "b": "x"})
    assert last.json()["content"] == [{"type": "text", "text": "It is 5."}]
    assert [sample["metadata"]["turns"] for sample in samples] == [[0, 1]]
    result = {"role": "tool", "content": "", "tool_call_id": use["id"], "is_error": True}
    assert record["turns"][1]["messages_delta"] == [result]
    assert record["turns"][0]["notes"]["dialect"] == "anthropic_messages"


@pytest.mark.parametrize(
    ("step", "fields", "reason", "sequence"),
    [
        (ScriptStep(text="abc"), {}, "end_turn", None),
        (ScriptStep(text="abc", finish=FinishReason.LENGTH), {}, "max_tokens", None),
        (ScriptStep(text="abcdef"), {"stop_sequences": ["zz", "cd"]}, "stop_sequence", "cd"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_reason_of_the_end(step: ScriptStep, fields: Json, reason: str, sequence: str | None, stream: bool):
    """In the words of the dialect, with the sequence that was met."""
    async with session_on(step) as (client, session):
        answer = await ask(client, session, stream=stream, **fields)
        [turn] = (await client.record(session))["turns"]

    message = gather_blocks(events_of(answer)) if stream else answer.json()
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    assert turn["notes"].get("matched_stop") == sequence
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == turn["prompt_length"]
    assert usage["output_tokens"] == turn["output_length"]


async def test_a_stream_that_waits_is_kept_alive_by_pings():
    """Before anything else; the message is the recorded one."""
    async with serving(ScriptStep(text="yes", delay_s=0.1), settings=ServerSettings(comment_every_s=0.02)) as client:
        session = await client.create()
        events = events_of(await ask(client, session, stream=True))
        [turn] = (await client.record(session))["turns"]

    assert events[0] == {"type": "ping"}
    assert gather_blocks(events)["content"] == [{"type": "text", "text": "yes"}]
    assert gather_blocks(events)["id"] == f"msg_{turn['notes']['response_id']}"


async def test_a_count_is_that_of_the_prompt_and_leaves_nothing_behind(client, session):
    """For a root and behind a turn, many at once, at a shut gate."""
    first = await ask(client, session, path="/count_tokens", system="be", tools=[TOOL])
    await ask(client, session, system="be", tools=[TOOL])
    history = [*HI, {"role": "assistant", "content": "one"}, user("and?")]
    await client.http.post("/sessions/pause")
    before = await client.record(session)
    counts = await asyncio.gather(
        *(ask(client, session, history, path="/count_tokens", system="be", tools=[TOOL]) for _ in range(50))
    )
    after = await client.record(session)
    await client.http.post("/sessions/resume")
    await ask(client, session, history, system="be", tools=[TOOL])
    turns = (await client.record(session))["turns"]

    assert before == after
    assert first.json() == {"input_tokens": turns[0]["prompt_length"]}
    assert {count.json()["input_tokens"] for count in counts} == {turns[1]["prompt_length"]}


async def test_errors_have_the_envelope_of_the_dialect(client, session):
    """Of the request, of the session, of a route that is none, with the statuses and headers of every dialect."""
    malformed = await ask(client, session, [])
    unknown = await ask(client, session, path="/batches")
    await client.http.post("/sessions/drain")
    closed = await ask(client, session)

    for answer, status, kind, code in (
        (malformed, 400, "invalid_request_error", "invalid_request"),
        (unknown, 404, "not_found_error", "route_not_found"),
        (closed, 404, "not_found_error", "session_closed"),
    ):
        body = answer.json()
        assert (answer.status_code, body["type"]) == (status, "error")
        assert (body["error"]["type"], body["error"]["code"]) == (kind, code)
        assert body["request_id"].startswith("req_")
        assert answer.headers["x-should-retry"] == "false"


async def test_an_error_after_the_stream_has_begun_is_an_event():
    """The last one."""
    settings = ServerSettings(pause_timeout_s=0.2, comment_every_s=0.02)
    async with session_on(settings=settings) as (client, session):
        await client.http.post("/sessions/pause")
        *pings, failure = events_of(await ask(client, session, stream=True))

    assert {ping["type"] for ping in pings} == {"ping"}
    assert (failure["type"], failure["error"]["type"]) == ("error", "overloaded_error")


@pytest.mark.parametrize("path", ["", "/count_tokens"])
async def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_clients_know(path: str):
    """They shorten the conversation at these."""
    async with session_on(context_length=4_000) as (client, session):
        most = client.engine.capabilities.context_length
        answer = await ask(client, session, [user("word " * most)], path)
        chat = await client.chat(session, [user("word " * most)])

    told = answer.json()["error"]
    assert (answer.status_code, told["type"], told["code"]) == (400, "invalid_request_error", "context_length_exceeded")
    assert re.fullmatch(rf"prompt is too long: \d+ tokens > {most} maximum", told["message"])
    assert chat.json()["error"]["message"].startswith(
        f"This model's maximum context length is {most} tokens. However, "
    )
    assert chat.json()["error"]["code"] == "context_length_exceeded"


async def test_an_answer_at_the_end_is_context():
    """A recorded one is gone on from; one of the client's own was said, and is not gone on inside of."""
    async with session_on(*says("{}", "more", "{}")) as (client, session):
        await ask(client, session)
        extended = await ask(client, session, [*HI, {"role": "assistant", "content": "{}"}])
        prefilled = await ask(client, session, [*HI, {"role": "assistant", "content": "["}])
        turns = (await client.record(session))["turns"]

    assert [answer.json()["content"][0]["text"] for answer in (extended, prefilled)] == ["more", "{}"]
    assert [turn["parent"] for turn in turns] == [None, 0, None]
    assert turns[2]["messages_delta"] == [*HI, {"role": "assistant", "content": "["}]

"""Live streams: text leaves while it is sampled, what an agent acts on leaves when the turn is durable."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from harness.engines.scripted import ScriptedFault, ScriptStep
from harness.server.http.streamed_answer import _Bell
from harness.server.settings import ServerSettings
from harness.sessions.session_config import StreamingMode
from tests.builders import tool, user
from tests.session_servers.served import PATIENCE_S, Client, Served, bearer, eventually, serving, session_on

LIVE = ServerSettings(streaming=StreamingMode.LIVE)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
TALE = "Once upon a time there was a model."
SLOW = ScriptStep(text=TALE, token_delay_s=0.02)
ADD = {"type": "object", "properties": {"a": {"type": "integer"}}}

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat/completions": (
        "/v1/chat/completions",
        {"messages": [user("hi")], "tools": [tool("add", properties=ADD["properties"])]},
    ),
    "responses": ("/v1/responses", {"input": "hi", "tools": [{"type": "function", "name": "add", "parameters": ADD}]}),
    "messages": (
        "/v1/messages",
        {"messages": [user("hi")], "max_tokens": 1_000, "tools": [{"name": "add", "input_schema": ADD}]},
    ),
}
DIALECTS = pytest.mark.parametrize("dialect", BODIES)


class Reading:
    """A stream, as far as it has been read."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.aiter_lines()
        self.events: list[Any] = []

    @property
    def text(self) -> str:
        """The content that has come, in whatever dialect."""
        return "".join(map(content_of, self.events))

    async def until(self, text: str) -> None:
        """Read on until the content holds `text`."""
        async with asyncio.timeout(PATIENCE_S):
            while text not in self.text:
                assert await self._read(), (text, self.text)

    async def to_the_end(self) -> None:
        """Read everything."""
        async with asyncio.timeout(PATIENCE_S):
            while await self._read():
                pass

    async def _read(self) -> bool:
        async for line in self._lines:
            if line.startswith("data: ") and line != "data: [DONE]":
                self.events.append(json.loads(line.removeprefix("data: ")))
                return True
        return False


def content_of(event: Any) -> str:
    """The content in one event."""
    if event.get("choices"):
        return event["choices"][0]["delta"].get("content") or ""
    if event.get("type") == "response.output_text.delta":
        return str(event["delta"])
    return (
        str(event["delta"]["text"]) if event.get("type") == "content_block_delta" and "text" in event["delta"] else ""
    )


def is_for_an_agent(event: Any) -> bool:
    """An agent acts on it: a call, or how the answer ended."""
    if event.get("choices"):
        choice = event["choices"][0]
        return choice["finish_reason"] is not None or "tool_calls" in choice["delta"]
    kind = event.get("type", "")
    is_call = "call" in kind or event.get("item", {}).get("type") == "function_call"
    is_block = event.get("content_block", {}).get("type") == "tool_use"
    ends = ("response.completed", "response.incomplete", "message_delta", "message_stop")
    return is_call or is_block or kind in ends or kind.endswith(".done")


@asynccontextmanager
async def reading(client: Client[Any], session: Served, dialect: str = "chat/completions") -> AsyncIterator[Reading]:
    """A streamed call; leaving the block early is a client that leaves."""
    path, body = BODIES[dialect]
    url = f"/sessions/{session.session_id}{path}"
    asked = {"model": "m", "stream": True, **body}
    async with client.http.stream("POST", url, json=asked, headers=bearer(session.api_key)) as response:
        assert response.status_code == 200, await response.aread()
        yield Reading(response)


async def turns_of(client: Client[Any], session: Served) -> Sequence[Any]:
    """The recorded turns."""
    turns: list[Any] = (await client.record(session))["turns"]
    return turns


@DIALECTS
async def test_text_leaves_while_it_is_sampled_and_calls_when_they_are_recorded(dialect):
    """Nothing that an agent acts on comes before the store has the turn."""
    step = ScriptStep(text=f"{TALE}\n{CALL}", token_delay_s=0.02)
    async with session_on(step, settings=LIVE) as (client, session):
        async with reading(client, session, dialect) as stream:
            await stream.until("Once upon")
            assert await turns_of(client, session) == []
            assert not any(map(is_for_an_agent, stream.events))
            await stream.to_the_end()
        [turn] = await turns_of(client, session)

    assert stream.text == turn["reply"]["content"] == TALE
    assert is_for_an_agent(stream.events[-1])
    assert turn["reply"]["tool_calls"][0]["function"]["name"] == "add"


@DIALECTS
async def test_a_drained_turn_has_no_end(dialect):
    """Its stream ends with a failure, whatever was said."""
    async with session_on(SLOW, settings=LIVE) as (client, session):
        async with reading(client, session, dialect) as stream:
            await stream.until("Once")
            await client.http.post(f"/sessions/{session.session_id}/drain")
            await stream.to_the_end()
        [turn] = await turns_of(client, session)

    assert turn["status"] == "aborted"
    assert not any(map(is_for_an_agent, stream.events))
    last = stream.events[-1]
    assert "error" in last or last["type"] == "response.failed"


@DIALECTS
async def test_a_pause_is_silence_and_the_same_stream_goes_on(dialect):
    """Kept alive meanwhile; nothing is said twice."""
    settings = ServerSettings(streaming=StreamingMode.LIVE, comment_every_s=0.05)
    async with session_on(SLOW, settings=settings) as (client, session):
        async with reading(client, session, dialect) as stream:
            await stream.until("Once")
            await client.http.post("/sessions/pause")
            await client.engine.abort(None)
            await client.held(1)
            await client.http.post("/sessions/resume")
            await stream.to_the_end()
        [turn] = await turns_of(client, session)

    assert stream.text == turn["reply"]["content"] == TALE
    assert turn["notes"].get("attempts", 1) == 1


@DIALECTS
async def test_a_retry_of_a_cut_stream_begins_with_what_was_recorded(dialect):
    """And continues live; it is one turn."""
    async with session_on(SLOW, settings=LIVE) as (client, session):
        async with reading(client, session, dialect) as first:
            await first.until("Once upon")
        await eventually(lambda: not client.engine.live)
        async with reading(client, session, dialect) as second:
            await second.to_the_end()
        [turn] = await turns_of(client, session)

    assert turn["reply"]["content"].startswith(first.text)
    assert second.text == turn["reply"]["content"] == TALE
    assert turn["notes"]["attempts"] == 2


@DIALECTS
async def test_a_retry_that_was_read_before_its_client_had_left_goes_on_live(dialect):
    """Under its own id, with the turn of the call before it."""
    async with session_on(SLOW, settings=LIVE) as (client, session):
        path, body = BODIES[dialect]
        async with reading(client, session, dialect) as first:
            await first.until("Once")
            await client.http.post("/sessions/pause")
            url, asked = f"/sessions/{session.session_id}{path}", {"model": "m", "stream": True, **body}
            asking = asyncio.create_task(client.http.post(url, json=asked, headers=bearer(session.api_key)))
            await client.held(1)
        await eventually(lambda: not client.engine.live)
        await client.http.post("/sessions/resume")
        async with asyncio.timeout(PATIENCE_S):
            answer = await asking
        [turn] = await turns_of(client, session)

    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert "".join(map(content_of, events)) == turn["reply"]["content"] == TALE
    assert is_for_an_agent(events[-1])


async def test_a_request_that_breaks_goes_on_in_the_same_stream():
    """What had arrived of it stays said."""
    breaks = ScriptStep(text=TALE, token_delay_s=0.01, fault=ScriptedFault.DISCONNECT, fault_after=12)
    async with session_on(breaks, SLOW, settings=LIVE) as (client, session):
        async with reading(client, session) as stream:
            await stream.to_the_end()
        [turn] = await turns_of(client, session)

    assert stream.text == turn["reply"]["content"]


async def test_a_session_may_want_its_streams_recorded():
    """Whatever the server does by default, and the other way around."""
    for settings, wish in ((LIVE, "recorded"), (ServerSettings(), "live")):
        async with serving(SLOW, settings=settings) as client:
            session = await client.create(streaming=wish)
            async with reading(client, session) as stream:
                await stream.until("Once")
                assert bool(await turns_of(client, session)) == (wish == "recorded")


async def test_text_that_comes_fast_is_gathered():
    """Each part costs as much as many tokens."""
    async with session_on(ScriptStep(text=10 * TALE, token_delay_s=1e-9), settings=LIVE) as (client, session):
        async with reading(client, session) as stream:
            await stream.to_the_end()
        [turn] = await turns_of(client, session)

    assert stream.text == 10 * TALE
    assert len(stream.events) < len(turn["output_ids"]) / 2


async def test_a_time_that_has_just_passed_breaks_no_stream():
    """With uvloop it has a handle that does not say its time."""
    loop = asyncio.get_running_loop()
    bell = _Bell()
    for _ in range(2_000):
        bell.ring_by(loop.time() + 1e-7)
        bell.ring_by(loop.time() + 5e-8)
    async with asyncio.timeout(30):
        await bell.heard()
    bell.stop()

"""Streamed chat completions: what arrives, when, and what of it is remembered."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from harness.dialects.model_request import AnswerHead, WireCall
from harness.dialects.openai_chat import OpenAIChat
from harness.dialects.openai_chat_request import parse_request
from harness.engines.base import PauseMode
from harness.engines.scripted import ScriptedFault, ScriptStep
from harness.server.http.connection import ClientConnection
from harness.server.http.streamed_answer import StreamedAnswer, StreamedTurn
from harness.server.settings import ServerSettings
from harness.tokens.outputs.live_text import LiveText
from harness.types import Message
from tests.builders import body, user
from tests.session_servers.served import Client, Served, eventually, says, session_on, url_of

HI = [user("hi")]
TALKATIVE = ServerSettings(comment_every_s=0.01)
TACITURN = ServerSettings(comment_every_s=60)
SLOW = ScriptStep(text="a long and slow answer", token_delay_s=0.02)
HANGS = ScriptStep(text="abc", fault=ScriptedFault.HANG, fault_after=2)


@dataclass(frozen=True, slots=True)
class Stream:
    """An answer that is arriving."""

    response: httpx.Response
    lines: AsyncIterator[str]

    async def keep_alive(self) -> None:
        """Return at the next event that says nothing."""
        async for line in self.lines:
            if line and says_nothing(json.loads(line.removeprefix("data: "))):
                return
        pytest.fail("no keep-alive came")

    async def events(self) -> list[Any]:
        """The data of all further events that say something; `[DONE]` is the last."""
        data = [line.removeprefix("data: ") async for line in self.lines if line.startswith("data: ")]
        assert data[-1] == "[DONE]"
        events = [json.loads(line) for line in data[:-1]]
        return [event for event in events if not says_nothing(event)]


def says_nothing(event: Any) -> bool:
    """Whether it is a chunk with an empty delta, and does not finish the answer."""
    return [(choice["delta"], choice["finish_reason"]) for choice in event.get("choices", [])] == [({}, None)]


@asynccontextmanager
async def streaming(
    client: Client, session: Served, messages: Sequence[Message] = HI, **fields: Any
) -> AsyncIterator[Stream]:
    """A streamed model call; leaving the block early is a client that leaves."""
    request = {"model": "m", "messages": list(messages), "stream": True, **fields}
    async with client.http.stream("POST", url_of(session), json=request) as response:
        yield Stream(response, response.aiter_lines())


def text_of(events: Sequence[Any], field: str = "content") -> str:
    """What the deltas add up to."""
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    return "".join(delta.get(field) or "" for delta in deltas)


async def delivered(client: Client, session: Served) -> list[bool]:
    """Which turns the record calls delivered."""
    return [turn["delivered"] for turn in (await client.record(session))["turns"]]


async def test_a_slow_engine_is_waited_for_with_events():
    """No delta before the turn is recorded."""
    async with session_on(*says("hello"), settings=TALKATIVE) as (client, session):
        await client.engine.pause(PauseMode.KEEP)
        async with streaming(client, session) as stream:
            await stream.keep_alive()
            assert (await client.record(session))["turns"] == []
            await client.engine.resume()
            events = await stream.events()

    assert text_of(events) == "hello"


@pytest.mark.parametrize(
    ("steps", "fields", "refused"),
    [
        ((), {"n": 2}, (400, "invalid_request")),
        ((), {"messages": []}, (400, "invalid_request")),
        ((ScriptStep(text="abc", fault=ScriptedFault.ABORT),), {}, (404, "turn_aborted")),
        ((ScriptStep(fault=ScriptedFault.REJECT),), {}, (400, "engine_rejected")),
    ],
)
async def test_an_error_that_comes_soon_has_its_own_status(steps, fields, refused):
    """As without streaming, so that clients react to it as they do."""
    async with session_on(*steps, settings=TACITURN) as (client, session):
        async with streaming(client, session, **fields) as stream:
            answer = json.loads(await stream.response.aread())
        record = await client.record(session)

    assert (stream.response.status_code, answer["error"]["code"]) == refused
    assert stream.response.headers["content-type"] == "application/json"
    assert record["refusals"] == {refused[1]: 1}


async def test_an_error_after_the_answer_has_begun_is_an_event():
    """In the form of the dialect, counted like others; the answer ends, and nothing of the turn was sent."""
    async with session_on(HANGS, settings=TALKATIVE) as (client, session):
        async with streaming(client, session) as stream:
            await stream.keep_alive()
            await client.turns_in_flight(1)
            await client.http.post("/sessions/drain")
            await client.engine.abort(None)
            events = await stream.events()
        record = await client.record(session)
        metrics = (await client.http.get("/metrics")).text

    assert [event["error"]["code"] for event in events] == ["turn_aborted"]
    assert [(turn["status"], turn["delivered"]) for turn in record["turns"]] == [("aborted", False)]
    assert record["refusals"] == {"turn_aborted": 1}
    assert 'harness_errors_total{code="turn_aborted"} 1.0' in metrics


async def test_a_client_that_leaves_a_held_stream_is_noticed():
    """Nobody waits at the gate for it, and no turn begins."""
    async with session_on(settings=TALKATIVE) as (client, session):
        await client.http.post("/sessions/pause")
        async with streaming(client, session) as stream:
            await stream.keep_alive()
        await eventually(lambda: client.server.gatekeeper.held == 0)
        await client.http.post("/sessions/resume")
        record = await client.record(session)

    assert (record["turns"], record["turns_in_flight"]) == ([], 0)


@pytest.mark.parametrize("settings", [TALKATIVE, TACITURN])
async def test_a_client_that_leaves_stops_the_engine(settings):
    """Before and after its answer has begun; the partial output is kept, and is not called delivered."""
    async with session_on(HANGS, settings=settings) as (client, session):
        request = asyncio.create_task(take_all(client, session))
        await client.turns_in_flight(1)
        request.cancel()
        await asyncio.wait([request])
        await client.turns_in_flight(0)
        await eventually(lambda: len(client.server.sessions.in_memory(session.session_id).turns) == 1)
        turn = (await client.record(session))["turns"][0]

    assert (turn["status"], len(turn["output_ids"]), turn["delivered"]) == ("aborted", 2, False)


async def test_a_bug_leaves_an_answer_that_has_begun_without_an_end():
    """The error continues to the web server, which cuts the connection: never an end that could be read as one."""
    sent = []

    async def serve():
        await eventually(lambda: len(sent) >= 2)
        raise ZeroDivisionError

    async def receive():
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    asked = parse_request(WireCall(body(HI, stream=True)))
    stream = OpenAIChat().stream(AnswerHead(asked, "1", "m", 1.0))
    turn = StreamedTurn(stream, LiveText(), serve=serve, content=pytest.fail, failure=pytest.fail, delivery=pytest.fail)
    answer = StreamedAnswer(turn, ClientConnection(None, {}), ExitStack(), comment_every_s=0.01)
    with pytest.raises(ZeroDivisionError):
        await answer({}, receive, send)

    assert [message["type"] for message in sent[:2]] == ["http.response.start", "http.response.body"]
    assert all(message["more_body"] for message in sent[1:])


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_a_client_that_leaves_behind_a_stream_on_the_same_connection_is_noticed(*, streamed: bool):
    """The end of the stream before comes some rounds after the next request, and takes nothing of that away."""

    def call(text: str, *, stream: bool) -> bytes:
        content = body([user(text)], stream=stream)
        head = f"POST {url_of(session)} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
        return head.encode() + content

    hangs = ScriptStep(text="a slow answer", token_delay_s=0.01, fault=ScriptedFault.HANG, fault_after=5)
    async with session_on(ScriptStep(text="fast"), hangs) as (client, session):
        parts = urlsplit(client.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(call("one", stream=True))
        async with asyncio.timeout(30):
            await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.write(call("two", stream=streamed))
        await eventually(lambda: any(live.sampled == 5 for live in client.engine.live))
        writer.close()
        await eventually(lambda: not client.server.sessions.in_memory(session.session_id).turns_in_flight)
        last = (await client.record(session))["turns"][-1]

    assert (last["end"], last["delivered"]) == ("client_left", False)


async def take_all(client: Client, session: Served) -> list[Any]:
    """The events of a streamed call."""
    async with streaming(client, session) as stream:
        return await stream.events()


async def test_the_record_says_who_asked_and_under_which_id_it_was_answered():
    """The same id in every part, the keep-alives included; the client's own ids are cut, its key is nowhere."""
    headers = {"user-agent": "probe/1", "x-probe-session-id": "s" * 500, "thread-id": "t1", "x-api-key": "sk-hidden"}
    async with session_on(ScriptStep(text="hello", delay_s=0.1), settings=TALKATIVE) as (client, session):
        content = {"messages": HI, "stream": True}
        answer = await client.http.post(url_of(session), json=content, headers=headers)
        [turn] = (await client.record(session))["turns"]

    data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    events = [json.loads(line) for line in data[:-1]]
    assert says_nothing(events[0])
    assert {event["id"] for event in events} == {"chatcmpl-" + turn["notes"]["response_id"]}
    assert turn["notes"]["dialect"] == "openai_chat"
    ids = {"x-probe-session-id": "s" * 200, "thread-id": "t1"}
    assert turn["notes"]["client"].pop("process")["id"].startswith(f"{os.getpid()}.")
    assert turn["notes"]["client"] == {"user_agent": "probe/1", "ids": ids}


async def test_a_key_in_a_header_that_names_a_session_is_not_recorded():
    """Clients write keys and ids where nobody expects them."""
    async with session_on(ScriptStep(text="hello")) as (client, session):
        headers = {"x-session-id": session.api_key, "user-agent": f"probe {session.session_id}"}
        await client.http.post(
            url_of(session), json={"messages": HI}, headers={**headers, "x-api-key": session.api_key}
        )
        [turn] = (await client.record(session))["turns"]

    noted = {"user_agent": f"probe {session.session_id[:8]}…", "ids": {"x-session-id": "sk-harness-…"}}
    assert turn["notes"]["client"].items() >= noted.items()
    assert session.api_key not in json.dumps(turn)


async def test_a_retry_has_the_id_of_the_answer_that_it_waits_for():
    """Also where its stream begins before the turn, which the first request has begun, has ended."""
    async with session_on(SLOW, settings=TALKATIVE) as (client, session):
        async with streaming(client, session) as stream:
            await stream.keep_alive()
            await client.sampling()
        await client.turns_in_flight(0)
        answer = await client.http.post(url_of(session), json={"model": "m", "messages": HI, "stream": True})
        [turn] = (await client.record(session))["turns"]

    data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert {json.loads(line)["id"] for line in data[:-1]} == {"chatcmpl-" + turn["notes"]["response_id"]}

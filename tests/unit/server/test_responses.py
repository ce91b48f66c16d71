"""Responses over HTTP: a conversation by ids, an answer asked for again, and what else its clients ask for."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.engines.scripted import ScriptStep
from harness.server.settings import ServerSettings
from harness.sessions.session_config import StreamingMode
from harness.types import Json
from tests.session_servers.served import Client, Served, SetClock, bearer, eventually, says, serving, session_on
from tests.unit.dialects.test_openai_responses_stream import events_of


async def respond(client: Client[Any], session: Served, **body: Any) -> httpx.Response:
    """A model call in this dialect."""
    url = f"/sessions/{session.session_id}/v1/responses"
    return await client.http.post(url, json=body, headers=bearer(session.api_key))


async def answer_of(client: Client[Any], session: Served, **body: Any) -> Json:
    """The answer of one that must succeed."""
    answer = await respond(client, session, **body)
    assert answer.status_code == 200, answer.text
    whole: Json = answer.json()
    return whole


async def ask_again(client: Client[Any], session: Served, response_id: str, query: str = "") -> httpx.Response:
    """The stored answer."""
    url = f"/sessions/{session.session_id}/v1/responses/{response_id}{query}"
    return await client.http.get(url, headers=bearer(session.api_key))


async def test_a_conversation_by_ids_is_one_branch_also_after_a_restart(tmp_path: Path):
    """Rebuilt from the session's own turns; the answers stay what they were."""
    store = tmp_path / "store.sqlite"
    async with session_on(*says("One.", "Two."), store=store) as (client, session):
        first = await answer_of(client, session, input="a", instructions="Be brief.")
        second = await answer_of(client, session, input="b", instructions="Be brief.", previous_response_id=first["id"])
    async with serving(*says("Three."), store=store) as client:
        third = await answer_of(client, session, input="c", instructions="Be brief.", previous_response_id=second["id"])
        assert (await ask_again(client, session, second["id"])).json() == second
        record = await client.record(session)

    assert [each["output"][0]["content"][0]["text"] for each in (first, second, third)] == ["One.", "Two.", "Three."]
    assert [turn["parent"] for turn in record["turns"]] == [None, 0, 1]
    assert [turn["notes"]["dialect"] for turn in record["turns"]] == ["openai_responses"] * 3


async def test_unknown_ids_are_refused(client):
    """Those of others, too."""
    session, other = await client.create(), await client.create()
    foreign = (await answer_of(client, other, input="a"))["id"]

    for response_id in ("resp_x", "", foreign):
        asked = await ask_again(client, session, response_id or "resp_")
        assert asked.status_code == 404
    refused = await respond(client, session, input="b", previous_response_id=foreign)

    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "previous_response_not_found"


async def test_a_stored_answer_is_not_streamed(client, session):
    """It is refused, not answered in another form."""
    answer = await answer_of(client, session, input="a")

    assert (await ask_again(client, session, answer["id"], "?stream=true")).status_code == 400


async def test_a_retry_has_the_id_of_the_answer_that_was_lost():
    """Streamed or whole, and the second of the day at which it is sent is no part of it."""
    async with session_on(*says("One."), clock=SetClock()) as (client, session):
        url, headers = f"/sessions/{session.session_id}/v1/responses", bearer(session.api_key)
        again = headers | {"x-stainless-retry-count": "1"}
        body = {"input": "a", "stream": True}

        first, second = [
            events_of((await client.http.post(url, json=body, headers=each)).content) for each in (headers, again)
        ]
        record = await client.record(session)

    assert first == second
    assert len(record["turns"]) == 1


async def leave(client: Client[Any], session: Served, body: Json) -> None:
    """A client that goes while its answer is sampled."""
    asking = asyncio.create_task(respond(client, session, **body))
    await client.sampling()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    held = client.server.sessions.in_memory(session.session_id)
    await eventually(lambda: held is not None and bool(held.turns) and not held.turns_in_flight)


def text_of(answer: Json) -> str:
    """That of the message in an answer."""
    text: str = answer["output"][0]["content"][0]["text"]
    return text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("streaming", StreamingMode)
async def test_each_answer_has_an_id_of_its_own(streaming: StreamingMode, stream: bool):
    """However many retries wait for the gate that all mean the same turn until it opens; the rest are other samples."""
    settings = ServerSettings(streaming=streaming, comment_every_s=0.02)
    steps = [ScriptStep(text=f"This is answer {number}.", token_delay_s=0.005) for number in range(5)]
    async with session_on(*steps, settings=settings) as (client, session):
        body = {"input": "a", "stream": stream}
        await leave(client, session, body)
        await client.http.post("/sessions/pause", json={"holder": "test"})
        asking = [asyncio.create_task(respond(client, session, **body)) for _ in range(4)]
        await client.held(4)
        await client.http.post("/sessions/resume", json={"holder": "test"})
        bodies = await asyncio.gather(*asking)
        answers = [events_of(each.content)[-1]["response"] if stream else each.json() for each in bodies]

        assert len({each["id"] for each in answers}) == 4
        assert all([(await ask_again(client, session, each["id"])).json() == each for each in answers])
        last = await answer_of(client, session, input="b", previous_response_id=answers[0]["id"])
        record = await client.record(session)

    [parent] = [turn["parent"] for turn in record["turns"] if turn["notes"]["response_id"] == last["id"][5:]]
    assert record["turns"][parent]["reply"]["content"] == text_of(answers[0])


async def test_a_stream_whose_answer_was_given_under_another_id_fails_and_its_retry_has_it():
    """It has told its client an id by which nothing is found."""
    async with session_on(*says("One."), settings=ServerSettings(comment_every_s=0.02)) as (client, session):
        await client.http.post("/sessions/pause", json={"holder": "test"})
        url = f"/sessions/{session.session_id}/v1/responses"
        headers = bearer(session.api_key) | {"x-stainless-retry-count": "1"}

        async with AsyncExitStack() as both:
            begun = [
                await both.enter_async_context(
                    client.http.stream("POST", url, json={"input": "a", "stream": True}, headers=headers)
                )
                for _ in range(2)
            ]
            await client.http.post("/sessions/resume", json={"holder": "test"})
            streams = [events_of(await stream.aread()) for stream in begun]
        again = events_of((await client.http.post(url, json={"input": "a", "stream": True}, headers=headers)).content)

    [answer] = [events[-1]["response"] for events in streams if events[-1]["type"] == "response.completed"]
    [failed] = [events[-1]["response"] for events in streams if events[-1]["type"] == "response.failed"]
    assert failed["error"]["code"] == "answer_changed"
    assert all(len({event["response"]["id"] for event in each if "response" in event}) == 1 for each in streams)
    assert again[-1]["response"] == answer


async def test_models_have_a_list_for_clients_that_want_their_own_form(client, session):
    """Empty; others read the usual one."""
    url, headers = f"/sessions/{session.session_id}/v1/models", bearer(session.api_key)
    usual = (await client.http.get(url, headers=headers)).json()
    described = (await client.http.get(f"{url}?client_version=0.169.0", headers=headers)).json()

    assert described == usual | {"models": []}


@pytest.mark.parametrize("prefix", ["/sessions/{id}", ""])
async def test_a_websocket_is_refused_at_once(client, session, prefix):
    """So that its client asks by HTTP without a reconnect."""
    answer = await client.http.get(
        f"{prefix.format(id=session.session_id)}/v1/responses",
        headers={
            **bearer(session.api_key),
            "connection": "Upgrade",
            "upgrade": "websocket",
            "sec-websocket-version": "13",
            "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
        },
    )

    assert (answer.status_code, answer.json()["error"]["code"]) == (426, "upgrade_refused")


async def test_what_is_not_served_names_what_is(client, session):
    """The compaction that only the vendor has, and completions of old."""
    for path in ("responses/compact", "completions", "responses/input_tokens"):
        answer = await client.http.post(f"/sessions/{session.session_id}/v1/{path}", json={})

        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "route_not_found")
        assert "/v1/responses" in answer.json()["error"]["message"]

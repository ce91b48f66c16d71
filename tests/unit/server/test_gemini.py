"""Gemini over HTTP: branches, streams of two forms, counting, errors."""

import json
from typing import Any

import httpx
import pytest

from harness.engines.scripted import Script, ScriptedEngine, ScriptStep
from harness.server.settings import ServerSettings
from harness.types import FinishReason, Json
from tests.dialects.speakers import gather_parts
from tests.session_servers.served import Client, Served, serving_with, session_on
from tests.unit.server.test_reasoning import reasoning_tokenizer

HI: list[Json] = [{"role": "user", "parts": [{"text": "hi"}]}]


async def ask(client: Client, session: Served, contents: Any = HI, method: str = "", **fields: Any) -> httpx.Response:
    """A call of a method, `generateContent` by default."""
    url = f"/sessions/{session.session_id}/v1beta/models/org/m:{method or 'generateContent'}"
    return await client.http.post(
        url, json={"contents": contents, **fields}, headers={"x-goog-api-key": session.api_key}
    )


@pytest.mark.parametrize("version", ["v1", "v1beta", "v1alpha"])
async def test_every_version_of_the_path_is_served(client, session, version: str):
    """The SDKs of one year name several."""
    url = f"/sessions/{session.session_id}/{version}/models/m:generateContent"
    answer = await client.http.post(url, json={"contents": HI})

    assert answer.json()["candidates"][0]["content"]["parts"][0]["text"] == "one"


@pytest.mark.parametrize(
    ("step", "reason"),
    [(ScriptStep(text="abc"), "STOP"), (ScriptStep(text="abc", finish=FinishReason.LENGTH), "MAX_TOKENS")],
)
@pytest.mark.parametrize("method", ["", "streamGenerateContent", "streamGenerateContent?alt=sse"])
async def test_the_reason_of_the_end(step: ScriptStep, reason: str, method: str):
    """Whole, as an array and as events, with the usage."""
    async with session_on(step) as (client, session):
        answer = await ask(client, session, method=method)
        [turn] = (await client.record(session))["turns"]

    if method.endswith("sse"):
        assert answer.headers["content-type"].startswith("text/event-stream")
        pieces = [json.loads(each.removeprefix("data: ")) for each in answer.text.split("\n\n") if each]
    else:
        assert answer.headers["content-type"] == "application/json"
        pieces = answer.json() if method else [answer.json()]
    told = gather_parts(pieces)
    assert told["candidates"][0]["finishReason"] == reason
    assert told["candidates"][0]["content"]["parts"][0]["text"] == "abc"
    usage = {"promptTokenCount": turn["prompt_length"], "candidatesTokenCount": turn["output_length"]}
    assert told["usageMetadata"] | usage == told["usageMetadata"]
    assert (told["modelVersion"], len(told["responseId"])) == ("scripted", 32)


@pytest.mark.parametrize("method", ["streamGenerateContent", "streamGenerateContent?alt=sse"])
async def test_a_slow_answer_keeps_its_client_waiting(method: str):
    """By pieces with an empty text, which chats of the SDK take."""
    slow = ScriptStep(text="yes", delay_s=0.2)
    async with session_on(slow, settings=ServerSettings(comment_every_s=0.02)) as (client, session):
        answer = await ask(client, session, method=method)

    lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line]
    pieces = answer.json() if not method.endswith("sse") else list(map(json.loads, lines))
    parts = [part for piece in pieces for part in piece["candidates"][0]["content"]["parts"]]
    assert parts[0] == {"text": ""}
    assert gather_parts(pieces)["candidates"][0]["content"]["parts"][0]["text"] == "yes"


@pytest.mark.parametrize("includes", [False, True])
@pytest.mark.parametrize("keeps", [False, True])
async def test_thoughts_are_told_on_request_and_known_by_their_signature(includes: bool, keeps: bool):
    """Whatever a client keeps of them, `exact` knows the reply if the signature comes back."""
    thought = ScriptStep(text="<think>\nhm\n</think>\n\nyes")
    config = {"thinkingConfig": {"includeThoughts": includes}}
    chat_tokenizer = reasoning_tokenizer()
    engine = ScriptedEngine(chat_tokenizer.tokenizer, Script((thought,)))
    async with serving_with(engine, chat_tokenizer=chat_tokenizer) as client:
        session = await client.create(matching=["exact"])
        parts = (await ask(client, session, generationConfig=config)).json()["candidates"][0]["content"]["parts"]
        kept = [part for part in parts if keeps or not part.get("thought")]
        await ask(client, session, [*HI, {"role": "model", "parts": kept}, *HI], generationConfig=config)
        record = await client.record(session)

    assert [part.get("text") for part in parts] == (["hm", "yes"] if includes else ["yes"])
    assert [turn["parent"] for turn in record["turns"]] == [None, 0]


async def test_a_prompt_is_counted(client, session):
    """No turn is recorded; a call of the same prompt has as many."""
    counted = await ask(client, session, method="countTokens")
    nothing = (await client.record(session))["turns"]
    usage = (await ask(client, session)).json()["usageMetadata"]

    assert (counted.json(), nothing) == ({"totalTokens": usage["promptTokenCount"]}, [])


async def test_errors_have_googles_form(client, session):
    """Bad input, an unknown method, an unknown session, a drained one."""
    bad = await ask(client, session, [{"role": "user", "parts": [{"inlineData": {}}]}])
    method = await ask(client, session, method="embedContent")
    unknown = await client.http.post("/sessions/unknown/v1beta/models/m:generateContent", json={"contents": HI})
    await client.http.post(f"/sessions/{session.session_id}/drain")
    drained = await ask(client, session)

    answers = (bad, method, unknown, drained)
    told = [answer.json()["error"] for answer in answers]
    assert [each["code"] for each in told] == [answer.status_code for answer in answers] == [400, 404, 404, 404]
    assert [each["status"] for each in told] == ["INVALID_ARGUMENT", *["NOT_FOUND"] * 3]
    reasons = ["invalid_request", "route_not_found", "session_not_found", "session_closed"]
    assert [each["details"][0]["reason"] for each in told] == reasons
    assert "nothing else can be recorded" in told[0]["message"]

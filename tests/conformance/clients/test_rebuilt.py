"""The stream helpers of real client libraries put together exactly what was recorded."""

import json
import os
from typing import Any

import httpx
import msgspec
import pytest

from harness.engines.scripted import Script, ScriptedEngine, ScriptStep
from harness.rollouts.agents.programs import prepare_agent
from harness.server.serving import serve
from harness.server.store.base import MemoryStore
from harness.types import FinishReason, Json
from tests.conformance.clients.players import PATIENCE_S, PROGRAMS, call, variables_of
from tests.dialects.speakers import SPEAKERS
from tests.run_to_end import run_to_end
from tests.session_servers.served import bearer
from tests.unit.server.test_reasoning import reasoning_tokenizer

pytestmark = [pytest.mark.agent, pytest.mark.timeout(200), pytest.mark.xdist_group("clients")]

STEPS = (
    ScriptStep(text="It is 9, " + "and more of it " * 30),
    ScriptStep(text="<think>\nLet me see.\n</think>\n\nYes."),
    ScriptStep(text=f"I add.\n{call(2, 3).text}\n{call(4, 5).text}"),
    ScriptStep(text='<tool_call>\n{"name": "patch", "arguments": {"input": "a\\n+é"}}\n</tool_call>'),
    ScriptStep(text='<tool_call>\n{"name": "add", '),
    ScriptStep(text="It is", finish=FinishReason.LENGTH),
    ScriptStep(),
)
"""A text, reasoning, two calls, one with free text, one that is malformed, a text that is cut, and nothing."""


async def rebuild(program: str, loop: str, streaming: str) -> tuple[list[Json], list[Json], list[Json]]:
    """What the program has put together, the turns that were recorded, and the answers that the server has stored."""
    agent = await prepare_agent(PROGRAMS / f"{program}.py")
    chat_tokenizer = reasoning_tokenizer()
    steps = [msgspec.structs.replace(step, token_delay_s=0.002 * (streaming == "live")) for step in STEPS]
    engine = ScriptedEngine(chat_tokenizer.tokenizer, Script(steps=tuple(steps)))
    async with (
        serve(engine, chat_tokenizer, MemoryStore()) as server,
        httpx.AsyncClient(base_url=server.url, timeout=30) as http,
    ):
        session = (await http.post("/sessions", json={"streaming": streaming})).json()
        env = {name: os.environ[name] for name in ("PATH", "HOME")} | {"LOOP": loop, "QUESTIONS": str(len(STEPS))}
        env |= variables_of(session["base_url"], session["api_key"])
        code, output, errors = await run_to_end(*agent.command, within_s=2 * PATIENCE_S, env=env)
        assert code == 0, errors
        turns = (await http.get(f"/sessions/{session['session_id']}")).json()["turns"]
        paths = [f"/v1/responses/resp_{turn['notes']['response_id']}" for turn in turns]
        stored = [(await http.get(path, headers=bearer(session["api_key"]))).json() for path in paths]
    return json.loads(output), turns, stored


def as_sent(value: Any) -> Any:
    """Without what the SDK adds to what it was sent."""
    if isinstance(value, dict):
        return {name: as_sent(each) for name, each in value.items() if not name.startswith("parsed")}
    return [as_sent(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("program", "streaming"), [("openai_2", "live"), ("openai_3", "recorded"), ("openai_3", "live")]
)
async def test_a_stream_helper_rebuilds_every_reply(program, streaming):
    """The items of the whole answer, the text of its deltas, and how it ended."""
    rebuilt, _, stored = await rebuild(program, "responses_loop", streaming)

    assert [as_sent(each["helper"]) for each in rebuilt] == [answer["output"] for answer in stored]
    assert [as_sent(each["done"]) for each in rebuilt] == [answer["output"] for answer in stored]
    assert [each["end"] for each in rebuilt] == [f"response.{answer['status']}" for answer in stored]
    texts = [
        [part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"]]
        for answer in stored
    ]
    assert [each["text"] for each in rebuilt] == ["".join(text) for text in texts]
    assert [each["snapshots"] for each in rebuilt] == [text if text != [""] else [] for text in texts]


@pytest.mark.parametrize(
    ("program", "dialect", "streaming"),
    [
        ("openai_2", "openai_chat", "live"),
        ("openai_3", "openai_chat", "recorded"),
        ("openai_3", "openai_chat", "live"),
        ("messages_anthropic_2", "anthropic_messages", "recorded"),
        ("messages_anthropic_2", "anthropic_messages", "live"),
    ],
)
async def test_a_stream_helper_rebuilds_every_message(program, dialect, streaming):
    """Reasoning, text and calls are those of the recorded reply, the arguments the same JSON."""
    rebuilt, turns, _ = await rebuild(program, "chat_loop", streaming)

    [speaker] = [speaker for speaker in SPEAKERS if speaker.name == dialect]
    replies = [{**turn["reply"], "content": turn["reply"]["content"] or ""} for turn in turns]
    assert [turn["notes"]["dialect"] for turn in turns] == [dialect] * len(STEPS)
    assert [comparable(speaker.reply(each["message"])) for each in rebuilt] == [comparable(reply) for reply in replies]
    assert [each["text"] for each in rebuilt] == [reply["content"] for reply in replies]


def comparable(reply: Json) -> Json:
    """A reply without what the SDK adds to it, its arguments as values."""
    calls = [
        (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in reply.get("tool_calls") or ()
    ]
    return {"content": reply["content"], "reasoning": reply.get("reasoning_content") or "", "calls": calls}

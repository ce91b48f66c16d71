"""A stream that is cut anywhere is never read as a whole answer, and the same request gets the recorded one."""

import asyncio
import json

import httpx
import pytest

from harness.engines.scripted import Script, ScriptedEngine, ScriptStep
from harness.server.serving import serve
from harness.server.store.base import MemoryStore
from harness.tokens.conversations import TOOLS
from harness.types import Json
from tests.builders import toy_template, user
from tests.dialects.speakers import SPEAKERS, Speaker

ANSWER = 'Sure.<tool_call>\n{"name": "find_city", "arguments": {"country": "日本"}}\n</tool_call>'
RETRIES = {"x-stainless-retry-count": "1"}
CUTS = 16
"""Places at which a client leaves, over all of a stream."""


def has_ended(stream: bytes) -> bool:
    """Whether a client takes what it has got for the end of an answer: an event that says so has come completely."""
    for part in stream.split(b"\n\n")[:-1]:
        data = part.rpartition(b"data: ")[2]
        if data == b"[DONE]":
            return True
        event = json.loads(data)
        choice = (event.get("choices") or event.get("candidates") or [{}])[0]
        is_end = choice.get("finish_reason") or choice.get("finishReason")
        if event.get("type") in ("message_stop", "response.completed") or is_end:
            return True
    return False


@pytest.mark.parametrize("speaker", SPEAKERS, ids=str)
def test_a_stream_that_is_cut_is_no_answer_and_its_retry_is(speaker):
    """Cut after every byte it has no end; left at any place its turn is recorded once and given again."""
    asyncio.run(cut_everywhere(speaker))


async def cut_everywhere(speaker: Speaker) -> None:
    """One session for each place at which its client leaves."""
    engine = ScriptedEngine(toy_template().tokenizer, Script(steps=(ScriptStep(text=ANSWER),)))
    path, body = speaker.call([user("Where?")], TOOLS, stream=True)
    async with (
        serve(engine, toy_template(), MemoryStore()) as server,
        httpx.AsyncClient(base_url=server.url, timeout=30) as http,
    ):

        async def create() -> tuple[str, str]:
            session_id = (await http.post("/sessions", json={})).json()["session_id"]
            return session_id, f"/sessions/{session_id}{path}"

        _, url = await create()
        whole = (await http.post(url, json=body)).content
        ends = [end for end in range(len(whole) + 1) if has_ended(whole[:end])]
        tail = whole[ends[0] :]
        assert len(whole) - len(tail) > 0.8 * len(whole), "the end comes last"
        assert ends == list(range(ends[0], len(whole) + 1))

        for end in range(0, ends[0], max(1, ends[0] // CUTS)):
            session_id, url = await create()
            async with http.stream("POST", url, json=body) as answer:
                got = b""
                async for piece in answer.aiter_raw(chunk_size=1):
                    got += piece
                    if len(got) >= end:
                        break
            retry = await http.post(url, json=body, headers=RETRIES)
            record: Json = (await http.get(f"/sessions/{session_id}")).json()
            [turn] = record["turns"]
            assert not has_ended(got)
            assert speaker.read(retry.text, stream=True)["content"] == turn["reply"]["content"] == "Sure."
            assert record["ledger"]["generated"] == record["ledger"]["trained"] == len(turn["output_ids"])

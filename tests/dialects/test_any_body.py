"""Whatever a client sends in any dialect: it is served and recorded, or refused by name and nothing has changed."""

import asyncio
import json
import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.engines.scripted import Script, ScriptedEngine, ScriptStep
from harness.server.serving import serve
from harness.server.settings import ServerSettings
from harness.server.store.memory import MemoryStore
from harness.tokens.conversations import TOOLS
from harness.types import Json, Message
from tests.builders import toy_template
from tests.dialects.speakers import SPEAKERS, Speaker, asks
from tests.thoroughness import examples

BODIES = 25
"""Of one example, all to one server."""
EXAMPLES = int(os.environ.get("HARNESS_SOAK_EXAMPLES", "0")) // BODIES or examples(10)
"""Per dialect: 250 bodies, and with HARNESS_SOAK_EXAMPLES=10000 as many."""
CALL = {"id": "c1", "type": "function", "function": {"name": "find_city", "arguments": '{"country": "France"}'}}
HISTORY: list[Message] = [
    {"role": "system", "content": "Help."},
    {"role": "user", "content": "Where?"},
    {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [CALL],
        "reasoning_content": "hm",
        "reasoning": "hm",
        "reasoning_details": [{"type": "reasoning.text", "text": "hm"}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "Paris"},
    {"role": "user", "content": "And?"},
]
JUNK: list[Any] = [
    None,
    True,
    0,
    -1,
    1.5,
    10**30,
    1e300,
    "",
    "\ud800",
    "\x00",
    "image",
    [],
    {},
    [[]],
    {"type": "image"},
]
JUNK += [{"type": "text"}, {"type": "text", "text": 5}, [{"type": "unknown"}], "x" * 300, {"a": {"b": [1]}}]


def places_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something can be changed."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*path, key)
        yield from places_in(each, (*path, key))


def changed(body: Json, path: tuple[Any, ...], how: Any) -> Json:
    """`body` with something else at `path`; without it when `how` is an ellipsis."""
    copy = json.loads(json.dumps(body))
    holder = copy
    for key in path[:-1]:
        holder = holder[key]
    if how is ...:
        del holder[path[-1]]
    else:
        holder[path[-1]] = how
    return copy


@st.composite
def bodies(draw: st.DrawFn, speaker: Speaker) -> bytes:
    """A body that is right but for a few places."""
    fields = draw(st.fixed_dictionaries({}, optional={name: st.sampled_from(JUNK) for name in ("n", "metadata", "x")}))
    body = asks(speaker, HISTORY[: draw(st.integers(2, 5))], TOOLS, stream=draw(st.booleans()), **fields)
    for _ in range(draw(st.integers(0, 2))):
        body = changed(body, draw(st.sampled_from(list(places_in(body)))), draw(st.sampled_from([..., *JUNK])))
    text = json.dumps(body)
    return text[: draw(st.sampled_from([len(text), len(text), len(text) // 2]))].encode()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("speaker", SPEAKERS, ids=str)
def test_any_body_is_served_or_refused(speaker):
    """Never a status of the server's own fault, never a change by a request that was refused."""

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(sent=st.lists(bodies(speaker), min_size=BODIES, max_size=BODIES))
    def check(sent: list[bytes]) -> None:
        asyncio.run(send_all(speaker, sent))

    check()


async def send_all(speaker: Speaker, sent: list[bytes]) -> None:
    """Send bodies one after the other, and look at the record after each."""
    engine = ScriptedEngine(toy_template().tokenizer, Script(steps=(ScriptStep(text="ok"),)))
    settings = ServerSettings(comment_every_s=60)
    async with (
        serve(engine, toy_template(), MemoryStore(), settings=settings) as server,
        httpx.AsyncClient(base_url=server.url) as http,
    ):
        session_id = (await http.post("/sessions", json={})).json()["session_id"]
        before: Json = {"turns": [], "ledger": {}}
        for body in sent:
            answer = await http.post(f"/sessions/{session_id}{speaker.path}", content=body)
            record = (await http.get(f"/sessions/{session_id}")).json()
            assert answer.status_code < 500, (body, answer.text)
            if answer.status_code == 200:
                assert len(record["turns"]) in (len(before["turns"]), len(before["turns"]) + 1), body
            else:
                assert 400 <= answer.status_code < 500
                assert answer.json()["error"]["message"], body
                assert record["turns"] == before["turns"], body
                assert not before["ledger"] or record["ledger"] == before["ledger"], body
            assert record["turns_in_flight"] == 0
            before = record

"""Whatever a client sends in any dialect: it is served and recorded, or refused by name and nothing has changed."""

import asyncio
import json
import os
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from harness.dialects.dialect import DIALECTS, Dialect
from harness.dialects.model_request import WireCall
from harness.dialects.request_limits import DEFAULT_LIMITS
from harness.engines.scripted import Script, ScriptedEngine, ScriptStep
from harness.errors import RequestError
from harness.server.serving import serve
from harness.server.settings import ServerSettings
from harness.server.store.base import MemoryStore
from harness.tokens.conversations import TOOLS
from harness.tokens.history import History
from harness.tokens.matching import chain_keys
from harness.types import Json, Message
from tests.builders import toy_template
from tests.dialects.speakers import SPEAKERS, Speaker
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
def bodies(draw: st.DrawFn, speaker: Speaker) -> tuple[str, bytes]:
    """A path, and a body that is right but for a few places."""
    fields = draw(st.fixed_dictionaries({}, optional={name: st.sampled_from(JUNK) for name in ("n", "metadata", "x")}))
    path, body = speaker.call(HISTORY[: draw(st.integers(2, 5))], TOOLS, stream=draw(st.booleans()))
    body |= fields
    for _ in range(draw(st.integers(0, 2))):
        body = changed(body, draw(st.sampled_from(list(places_in(body)))), draw(st.sampled_from([..., *JUNK])))
    text = json.dumps(body)
    return path, text[: draw(st.sampled_from([len(text), len(text), len(text) // 2]))].encode()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("speaker", SPEAKERS, ids=str)
def test_any_body_is_served_or_refused(speaker):
    """Never a status of the server's own fault, never a change by a request that was refused."""

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(sent=st.lists(bodies(speaker), min_size=BODIES, max_size=BODIES))
    def check(sent: list[tuple[str, bytes]]) -> None:
        asyncio.run(send_all(sent))

    check()


async def send_all(sent: list[tuple[str, bytes]]) -> None:
    """Send bodies one after the other, and look at the record after each."""
    engine = ScriptedEngine(toy_template().tokenizer, Script(steps=(ScriptStep(text="ok"),)))
    settings = ServerSettings(comment_every_s=60)
    async with (
        serve(engine, toy_template(), MemoryStore(), settings=settings) as server,
        httpx.AsyncClient(base_url=server.url, timeout=30) as http,
    ):
        session_id = (await http.post("/sessions", json={})).json()["session_id"]
        before: Json = {"turns": [], "ledger": {}}
        for path, body in sent:
            answer = await http.post(f"/sessions/{session_id}{path}", content=body)
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


WORDS = "user assistant system human tool text message reasoning function function_call function_call_output custom"
WORDS += " namespace input_text output_text tool_use tool_result thinking redacted_thinking image local_shell"
WORDS += " local_shell_call custom_tool_call item_reference json_schema required add c1"
FIELDS = "role content type text name input id tool_use_id thinking call_id arguments output function tool_calls tools"
FIELDS += (
    " parameters tool_call_id reasoning_content reasoning reasoning_details action instructions tool_choice format"
)
FIELDS += (
    " schema namespace summary encrypted_content system stream stream_options stop stop_sequences seed n temperature"
)
FIELDS += (
    " top_p top_k min_p max_tokens min_tokens logprobs top_logprobs response_format output_config metadata unknown"
)
WORDS += " model OBJECT STRING ANY NONE application/json"
FIELDS += " contents parts systemInstruction functionCall function_call functionResponse response args thought"
FIELDS += " thoughtSignature generationConfig toolConfig functionDeclarations parametersJsonSchema properties required"
FIELDS += " responseSchema responseMimeType thinkingConfig functionCallingConfig allowedFunctionNames mode nullable"
FIELD = st.sampled_from([*FIELDS.split(), "\ud800"])
WORD = st.sampled_from([*WORDS.split(), "\ud800", "\x00", ""])
VALUE = st.recursive(
    WORD | st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELD, inner, max_size=5),
    max_leaves=12,
)
ITEM = st.builds(
    lambda kind, content, more: {**kind, "content": content, "parts": content, **more},
    st.fixed_dictionaries({}, optional={"role": WORD, "type": WORD}),
    VALUE | st.text(max_size=5),
    st.dictionaries(FIELD, VALUE, max_size=3),
)
SAID = VALUE | st.lists(ITEM, max_size=3)
BODY = st.builds(
    lambda said, more: {"messages": said, "input": said, "contents": said, **more},
    SAID,
    st.dictionaries(FIELD, VALUE, max_size=3),
)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@settings(max_examples=examples(100), deadline=None, suppress_health_check=list(HealthCheck))
@given(raw=(BODY | VALUE).map(json.dumps).map(str.encode) | st.binary(max_size=40))
@example(raw=b'{"messages":[{"role":"user","content":"a"}],"messages":[{"role":"user","content":"b"}]}')
@example(raw=b'{"contents":[{"parts":[{"function_call":{"name":"a","args":{"b":18446744073709551616}}}]}]}')
@example(raw=b'{"contents":[],"tools":[{"function_declarations":[{"name":"a","parameters":{"any_of":[[]]}}]}]}')
@example(raw=b'{"input":[{"type":"reasoning"},{"type":"local_shell_call","call_id":"c","action":{}}]}')
def test_any_json_is_a_request_or_a_request_error(dialect: Dialect, raw: bytes):
    """Wrong types anywhere, huge numbers, lone surrogates: never another exception; what is accepted can be kept."""
    try:
        asked = dialect.parse(WireCall(raw), DEFAULT_LIMITS, History())
        chain_keys(asked.messages, asked.tools)
        toy_template().render_ids(asked.messages, asked.tools)
    except RequestError as error:
        msgspec.json.encode(dialect.error_body(error, error.message, ""))
        return
    assert msgspec.json.encode([list(asked.messages), asked.tools, asked.notes])

"""Parameters that are not served: noted in the turn and counted, and refused where a session is strict."""

import json

import httpx
import pytest

from harness.dialects.dialect import DIALECTS, Dialect
from harness.dialects.model_request import ModelRequest, WireCall
from harness.dialects.request_limits import DEFAULT_LIMITS
from harness.engines.scripted import ScriptStep
from harness.errors import MalformedRequest
from harness.server.telemetry.metrics import ServerMetrics
from harness.tokens.history import History
from harness.types import Json
from tests.dialects.speakers import SPEAKERS, Speaker
from tests.session_servers.scripted import scripted_server

SETTING: dict[str, tuple[Json, Json]] = {
    "openai_chat": ({"verbosity": "low"}, {"frequency_penalty": 0, "parallel_tool_calls": True, "user": None}),
    "anthropic_messages": ({"thinking": {"type": "adaptive"}}, {"thinking": None}),
    "gemini": ({"safetySettings": [{"category": "HARM"}]}, {"safetySettings": [], "cachedContent": None}),
    "openai_responses": ({"truncation": "auto"}, {"truncation": "disabled", "store": False, "stream_options": {}}),
}
"""By dialect: a setting that is not served, and fields by which nothing is ignored."""


@pytest.mark.parametrize("speaker", SPEAKERS, ids=str)
async def test_an_ignored_parameter_is_noted_counted_and_in_a_strict_session_refused(speaker: Speaker):
    """By its name and, where it is a setting, its value; a field that nobody knows by its name alone."""
    asked, nothing = SETTING[speaker.name]
    ignored = asked | {"made_up": "sk-secret"}
    body = speaker.body([{"role": "user", "content": "hi"}], [])
    async with (
        scripted_server(ScriptStep(text="Hello.")) as server,
        httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=30) as http,
    ):

        async def ask(session: Json, said: Json) -> Json:
            created = (await http.post("/sessions", json=session)).json()
            answer = await http.post(f"/sessions/{created['session_id']}{speaker.path}", json=said)
            record = (await http.get(f"/sessions/{created['session_id']}")).json()
            return {"status": answer.status_code, "body": answer.json(), "turns": record["turns"]}

        plain = await ask({}, body | ignored)
        refused = await ask({"strict": True}, body | ignored)
        served = await ask({"strict": True}, body | nothing)
        metrics = (await http.get("/metrics")).text

    (turn,) = plain["turns"]
    assert plain["status"] == 200
    assert turn["notes"]["ignored"] == asked | {"made_up": None}
    name = next(iter(asked))
    assert (refused["status"], refused["turns"]) == (400, [])
    assert f"{name}: expected none in a strict session" in refused["body"]["error"]["message"]
    assert served["status"] == 200
    assert "ignored" not in served["turns"][0]["notes"]
    for each in (name, "made_up"):
        assert f'harness_ignored_parameters_total{{dialect="{speaker.name}",parameter="{each}"}} 1.0' in metrics


@pytest.mark.parametrize(
    ("dialect", "field", "value"),
    [
        ("openai_chat", "reasoning", {"enabled": True, "exclude": True}),
        ("openai_responses", "reasoning", {"context": "all_turns", "mode": "pro"}),
        ("openai_responses", "text", {"made_up": 1}),
        ("anthropic_messages", "output_config", {"task_budget": {"total": 9}, "made_up": 1}),
        ("gemini", "generationConfig", {"speechConfig": {}}),
    ],
)
def test_a_part_of_a_setting_is_noted_with_its_place(dialect: str, field: str, value: Json):
    """Where only another part of the field is served."""
    (speaker,) = (each for each in SPEAKERS if each.name == dialect)
    (parser,) = (each for each in DIALECTS if each.name == dialect)
    body = speaker.body([{"role": "user", "content": "hi"}], [])

    asked = parser.parse(WireCall(json.dumps(body | {field: value}).encode(), path=speaker.path), DEFAULT_LIMITS, None)

    assert asked.notes.ignored == {f"{field}.{name}": None for name in value}


@pytest.mark.parametrize("value", [True, "high", [], 5])
def test_a_setting_that_has_no_parts_is_noted_whole(value: object):
    """Chat completions have no `reasoning` of their own, so other forms of it ask for nothing known."""
    body = {"messages": [{"role": "user", "content": "hi"}], "reasoning": value}
    (chat,) = (each for each in DIALECTS if each.name == "openai_chat")

    assert chat.parse(WireCall(json.dumps(body).encode()), DEFAULT_LIMITS, None).notes.ignored == {"reasoning": None}


def test_a_budget_of_reasoning_is_noted_with_its_value():
    """As in the other dialects: agents send it unasked."""
    body = {"messages": [{"role": "user", "content": "hi"}], "reasoning": {"max_tokens": 2_000}}
    (chat,) = (each for each in DIALECTS if each.name == "openai_chat")

    asked = chat.parse(WireCall(json.dumps(body).encode()), DEFAULT_LIMITS, None)

    assert asked.notes.ignored == {"reasoning.max_tokens": 2_000}


FOREIGN: Json = {
    "top_k": 5,
    "min_p": 0.1,
    "seed": 7,
    "stop": ["x"],
    "logit_bias": {"5": 1},
    "n": 2,
    "max_new_tokens": 5,
    "repetition_penalty": 1.1,
    "thinking_token_budget": 10,
    "repetition_detection": {"min_count": 2},
    "watermarking": True,
    "vllm_xargs": {"a": 1},
    "stop_regex": "a+",
    "input_ids": [1, 2],
    "add_special_tokens": True,
    "lora_path": "a",
    "modalities": ["audio"],
    "prefix": "once",
    "reasoning_effort": "low",
    "response_format": {"type": "json_object"},
}
"""Settings of engines and of other dialects that change the prompt or the sampling."""
SERVED = {
    "openai_chat": ("top_k", "min_p", "seed", "stop", "reasoning_effort", "response_format"),
    "anthropic_messages": ("top_k",),
}


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("name", FOREIGN)
def test_a_setting_of_another_api_is_served_or_refused_by_name(dialect: Dialect, name: str):
    """In every dialect: none that changes the prompt or the sampling is only noted."""
    (speaker,) = (each for each in SPEAKERS if each.name == dialect.name)
    body = speaker.body([{"role": "user", "content": "hi"}], [])

    def read(value: Json) -> ModelRequest:
        call = WireCall(json.dumps(body | {name: value}).encode(), path=speaker.path)
        return dialect.parse(call, DEFAULT_LIMITS, History())

    if name in SERVED.get(dialect.name, ()):
        asked = read(FOREIGN[name])
        assert asked.ignored == ()
        assert (asked.sampling, asked.template_variables) != (read(None).sampling, read(None).template_variables)
    else:
        with pytest.raises(MalformedRequest, match=name) as refused:
            read(FOREIGN[name])
        assert refused.value.param == name


def test_a_client_that_invents_names_does_not_make_the_metrics_grow():
    """Few of them are told apart, and none that is long."""
    metrics = ServerMetrics()
    for number in range(1_000):
        metrics.parameter_ignored("openai_chat", f"name{number}")
    metrics.parameter_ignored("openai_chat", "x" * 10_000)

    lines = [line for line in metrics.render().decode().splitlines() if "ignored_parameters_total{" in line]
    assert len(lines) == 65
    assert 'harness_ignored_parameters_total{dialect="openai_chat",parameter="other"} 937.0' in lines

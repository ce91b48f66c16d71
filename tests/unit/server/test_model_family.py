"""The template that a server renders with: its variables, and the tools and calls that it loses."""

from contextlib import asynccontextmanager

import pytest

from harness.engines.scripted import Script, ScriptedEngine
from harness.tokens.templates.chat_template import ChatTemplateTokenizer
from harness.tokens.templates.jinja_template import JinjaTemplate
from harness.types import Json
from tests.builders import tool, toy_template, toy_tokenizer, user
from tests.logged import capture_logs
from tests.session_servers.served import says, serving_with

WITHOUT_TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("loses_tools", [True, False])
async def test_lost_tools_are_named_at_the_start_in_health_and_in_the_record(loses_tools):
    """Not so where the template shows them, nor in the record of a request that has none."""
    lossy = ChatTemplateTokenizer(toy_tokenizer(), JinjaTemplate(WITHOUT_TOOLS))
    engine, template = ScriptedEngine(toy_tokenizer(), Script(says("hello"))), lossy if loses_tools else toy_template()
    with capture_logs() as logs:
        async with serving_with(engine, chat_tokenizer=template) as client:
            session = await client.create()
            await client.chat(session, [user("a")], tools=[tool()])
            await client.chat(session, [user("b")])
            health = (await client.http.get("/health")).json()
            record = await client.record(session)

    faults = list(template.describe().faults)
    assert bool(faults) == loses_tools
    assert [event["fault"] for event in logs if event["event"] == "template_loses_tools"] == faults
    assert (health["status"], health["model_family"]) == ("ok", {"faults": faults})
    assert [turn["notes"].get("model_family_faults", []) for turn in record["turns"]] == [faults, []]


async def test_unread_reasoning_is_named_at_the_start_in_health_and_in_every_record():
    """Also in the record of a request without tools."""
    source = WITHOUT_TOOLS.replace("{{ m.content }}", "{{ m.reasoning_content }} So: {{ m.content }}")
    template = ChatTemplateTokenizer(toy_tokenizer(), JinjaTemplate(source))
    with capture_logs() as logs:
        async with serving_with(ScriptedEngine(toy_tokenizer(), Script(says("x"))), chat_tokenizer=template) as client:
            session = await client.create()
            await client.chat(session, [user("a")])
            health = (await client.http.get("/health")).json()
            record = await client.record(session)

    [fault] = template.describe().reasoning_faults
    assert [event["fault"] for event in logs if event["event"] == "template_loses_reasoning"] == [fault]
    assert fault in health["model_family"]["faults"]
    assert record["turns"][0]["notes"]["model_family_faults"] == [fault]


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}<think></think>{% endif %}"
    "{% if reasoning_effort == 'none' %}{{ raise_exception('no such effort') }}{% endif %}"
    "{{ effort or reasoning_effort }}{% endif %}"
)
OFF, ON = {"enable_thinking": False}, {"enable_thinking": True}


@asynccontextmanager
async def thinking_server(**variables):
    """A server of a template with variables, some of which are set."""
    chat = ChatTemplateTokenizer(toy_tokenizer(), JinjaTemplate(THINKING)).with_variables(variables)
    engine = ScriptedEngine(toy_tokenizer(), Script(says("hello")))
    async with serving_with(engine, chat_tokenizer=chat) as client:
        yield client


def ends(record: Json) -> list[str]:
    """What the engine read behind the last question, by turn."""
    texts = (toy_tokenizer().decode(turn["prompt_ids"]) for turn in record["turns"])
    return [text.rpartition("assistant\n")[2] for text in texts]


@pytest.mark.parametrize(
    ("server", "session", "evaluates", "wish", "end"),
    [
        ({}, {}, True, {}, ""),
        (OFF, {}, False, {}, "<think></think>"),
        ({}, OFF, False, {}, "<think></think>"),
        (OFF, ON, False, {}, ""),
        ({}, {}, True, OFF, "<think></think>"),
        (OFF, {}, True, ON, ""),
        ({}, OFF, False, OFF, "<think></think>"),
        ({"effort": "low"}, OFF, True, {"effort": "high"}, "<think></think>high"),
    ],
)
async def test_variables_of_server_session_and_request_are_rendered_and_recorded(server, session, evaluates, wish, end):
    """The request's go before the session's, and those before the server's; the root has all of them."""
    async with thinking_server(**server) as client:
        created = await client.create(template_variables=session, after_incomplete="serve" if evaluates else "refuse")
        first = await client.chat(created, [user("a")], chat_template_kwargs=wish)
        reply = first.json()["choices"][0]["message"]
        again = await client.chat(created, [user("a"), reply, user("b")], chat_template_kwargs=wish)
        record = await client.record(created)

    assert (first.status_code, again.status_code) == (200, 200)
    assert ends(record) == [end, end]
    assert [turn["parent"] for turn in record["turns"]] == [None, 0]
    assert record["turns"][0]["notes"].get("template_variables", {}) == {**server, **session, **wish}


@pytest.mark.parametrize(
    ("session", "wish", "named"),
    [
        ({}, {"chat_template_kwargs": OFF}, "chat_template_kwargs.enable_thinking"),
        ({"template_variables": ON}, {"chat_template_kwargs": OFF}, "chat_template_kwargs.enable_thinking"),
        ({}, {"reasoning_effort": "high"}, "chat_template_kwargs.reasoning_effort"),
        ({"after_incomplete": "serve"}, {"chat_template_kwargs": {"nothing": 1}}, "'nothing'"),
        ({"after_incomplete": "serve"}, {"reasoning_effort": "none"}, "variables reasoning_effort: the chat template"),
        (
            {"after_incomplete": "serve", "request_template_variables": False},
            {"chat_template_kwargs": OFF},
            "chat_template_kwargs.enable_thinking",
        ),
    ],
)
async def test_a_variable_that_the_session_does_not_leave_open_is_refused_by_name(session, wish, named):
    """A training session's prompts are its owner's; a variable that no template reads changes nothing."""
    async with thinking_server() as client:
        answer = await client.chat(await client.create(**session), [user("a")], **wish)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template_kwargs")
    assert named in answer.json()["error"]["message"]


OTHER_EFFORTS = "{% if reasoning_effort == 'high' %}{{ raise_exception('unknown effort') }}{% endif %}" + WITHOUT_TOOLS
EFFORT = {
    "/v1/responses": ({"input": "a", "reasoning": {"effort": "high"}}, "reasoning.effort"),
    "/v1/messages": (
        {"messages": [user("a")], "max_tokens": 9, "output_config": {"effort": "high"}},
        "output_config.effort",
    ),
    "/v1/chat/completions": ({"messages": [user("a")], "reasoning": {"effort": "high"}}, "reasoning.effort"),
}


@pytest.mark.parametrize("path", EFFORT)
@pytest.mark.parametrize(
    ("source", "session", "end"),
    [
        (THINKING, {"after_incomplete": "serve"}, "high"),
        (THINKING, {"template_variables": {"reasoning_effort": "high"}}, "high"),
        (THINKING, {"template_variables": {"reasoning_effort": "low"}}, None),
        (THINKING, {}, ""),
        (WITHOUT_TOOLS, {"after_incomplete": "serve"}, ""),
        (OTHER_EFFORTS, {"after_incomplete": "serve"}, ""),
    ],
    ids=["open", "the session's", "another than the session's", "closed", "no effort", "an effort it refuses"],
)
async def test_the_effort_in_another_dialect_is_the_templates_where_it_reads_one(path, source, session, end):
    """Served, or refused by its name; noted where session or template have no place for it: agents send it unasked."""
    body, field = EFFORT[path]
    chat = ChatTemplateTokenizer(toy_tokenizer(), JinjaTemplate(source))
    async with serving_with(ScriptedEngine(toy_tokenizer(), Script(says("hello"))), chat_tokenizer=chat) as client:
        created = await client.create(**session)
        answer = await client.http.post(f"/sessions/{created.session_id}{path}", json=body)
        record = await client.record(created)

    if end is None:
        assert answer.status_code == 400
        assert f"{field}: expected the session's value" in answer.json()["error"]["message"]
    else:
        assert answer.status_code == 200
        assert ends(record) == [end]
        is_used = end.endswith("high")
        assert record["turns"][0]["notes"].get("ignored", {}) == ({} if is_used else {field: "high"})


async def test_an_effort_is_beside_other_variables():
    """In chat completions, whose own name for it goes first."""
    async with thinking_server() as client:
        session = await client.create(after_incomplete="serve")
        for more in ({}, {"reasoning_effort": "low"}):
            await client.chat(session, [user("a")], chat_template_kwargs=OFF, reasoning={"effort": "high"}, **more)
        record = await client.record(session)

    assert ends(record) == ["<think></think>high", "<think></think>low"]
    ignored = [turn["notes"].get("ignored", {}) for turn in record["turns"]]
    assert ignored == [{}, {"reasoning.effort": "high"}]


async def test_another_variable_is_another_root():
    """The same conversation with other variables continues nothing, whatever the session is told before."""
    async with thinking_server() as client:
        session = await client.create(after_incomplete="serve")
        first = await client.chat(session, [user("a")], chat_template_kwargs=OFF)
        history = [user("a"), first.json()["choices"][0]["message"], user("b")]
        for wish in (ON, OFF, {}):
            await client.chat(session, history, chat_template_kwargs=wish)
        record = await client.record(session)

    assert [turn["parent"] for turn in record["turns"]] == [None, None, 0, None]


async def test_a_session_with_a_variable_that_the_template_does_not_read_is_refused():
    """When it is created, where its owner sees it."""
    async with thinking_server() as client:
        answer = await client.http.post("/sessions", json={"template_variables": {"enable_thinkin": False}})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "template_variables")
    assert "enable_thinking" in answer.json()["error"]["message"]

"""Reasoning over the wire: served apart from the content, and what a client that drops it can expect."""

import json

import pytest
from tokenizers import AddedToken

from harness.dialects.anthropic_messages import AnthropicMessages
from harness.dialects.model_request import ModelAnswer, WireCall, seal
from harness.dialects.openai_responses import OpenAIResponses
from harness.engines.scripted import Script, ScriptedEngine, ScriptStep
from harness.server.store.base import MemoryStore
from harness.tokens.templates.chat_template import ChatTemplateTokenizer
from harness.tokens.templates.jinja_template import JinjaTemplate
from harness.tokens.tokenizer import Tokenizer
from tests.builders import body, new_session, patient_client, tool, toy_template, toy_tokenizer, turn_service, user
from tests.session_servers.served import serving_with

SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}


def reasoning_tokenizer(prompt_end: str = "") -> ChatTemplateTokenizer:
    """The toy tokenizer of a model that reasons between two ids of its own; `prompt_end` may begin the reasoning."""
    raw = type(toy_tokenizer()._raw).from_str(toy_tokenizer()._raw.to_str())
    raw.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>")])
    template = JinjaTemplate(f"{toy_template().template.text}{{% if add_generation_prompt %}}{prompt_end}{{% endif %}}")
    return ChatTemplateTokenizer(Tokenizer(raw, eos_ids=toy_tokenizer().eos_ids), template)


@pytest.mark.parametrize(
    ("text", "reasoning"), [('{"a": 1}', None), ('hm</think>{"a": 1}', "hm")], ids=["from the start", "after reasoning"]
)
async def test_an_answer_under_a_schema_is_content_where_the_prompt_begins_reasoning(text, reasoning):
    """Most engines hold the first token to the grammar, so that nothing ends the reasoning; some wait for its end."""
    chat_tokenizer = reasoning_tokenizer("<think>")
    engine = ScriptedEngine(chat_tokenizer.tokenizer, Script(steps=(ScriptStep(text=text),)))
    async with serving_with(engine, chat_tokenizer=chat_tokenizer) as client:
        said = await client.say(await client.create(), [user("a")], response_format=SCHEMA)

    assert (said["content"], said.get("reasoning_content")) == ('{"a": 1}', reasoning)


@pytest.mark.parametrize("begun", ["hm let me", "hm</think>", "1. First", "now", '"quoted" words'])
async def test_reasoning_that_is_cut_short_before_its_schema_is_no_content(begun):
    """By an engine that waits for the end of the reasoning."""
    chat_tokenizer = reasoning_tokenizer("<think>")
    text = f'{begun} see</think>{{"a": 1}}'
    engine = ScriptedEngine(chat_tokenizer.tokenizer, Script(steps=(ScriptStep(text=text),)))
    async with serving_with(engine, chat_tokenizer=chat_tokenizer) as client:
        answer = await client.chat(
            await client.create(),
            [user("a")],
            response_format=SCHEMA,
            max_tokens=len(chat_tokenizer.tokenizer.encode(begun)),
        )
        said = answer.json()["choices"][0]["message"]

    assert (said["content"], said["reasoning_content"]) == ("", begun.removesuffix("</think>"))


async def test_a_stop_id_of_the_session_leaves_an_answer_under_a_schema_content():
    """Where the prompt begins the reasoning, and the engine holds the first token to the grammar."""
    chat_tokenizer = reasoning_tokenizer("<think>")
    [stop_id] = chat_tokenizer.tokenizer.encode_plain("!")
    engine = ScriptedEngine(chat_tokenizer.tokenizer, Script(steps=(ScriptStep(text='{"a": 1}!'),)))
    async with serving_with(engine, chat_tokenizer=chat_tokenizer) as client:
        session = await client.create(sampling={"stop_token_ids": [stop_id]})
        said = await client.say(session, [user("a")], response_format=SCHEMA)

    assert (said["content"], said.get("reasoning_content")) == ('{"a": 1}', None)


@pytest.mark.parametrize("prompt_end", ["", "<think>\n"])
async def test_a_required_call_is_no_draft_where_the_prompt_begins_reasoning(prompt_end):
    """The reasoning is closed first, so the model that closes it again has made its call."""
    chat_tokenizer = reasoning_tokenizer(prompt_end)
    step = ScriptStep(text='add", "arguments": {"a": 1}}\n</tool_call>\n</think>')
    async with serving_with(
        ScriptedEngine(chat_tokenizer.tokenizer, Script(steps=(step,))), chat_tokenizer=chat_tokenizer
    ) as client:
        session = await client.create()
        said = await client.say(session, [user("a")], tools=[tool("add")], tool_choice="required")
        prompt = chat_tokenizer.tokenizer.decode((await client.record(session))["turns"][0]["prompt_ids"])

    closed = "<think>\n</think>\n\n" if prompt_end else ""
    assert prompt.endswith(f'assistant\n{closed}<tool_call>\n{{"name": "')
    assert [call["function"]["arguments"] for call in said["tool_calls"]] == ['{"a": 1}']


@pytest.mark.parametrize(("text", "parent"), [("hm", 0), ("", 0), ("rewritten", None)])
async def test_signed_reasoning_is_known_without_its_text(text, parent):
    """A client of Messages may drop the text of a thinking block and keep its signature; other words are others."""
    chat_tokenizer = reasoning_tokenizer()
    engine = ScriptedEngine(chat_tokenizer.tokenizer, Script(steps=(ScriptStep(text="<think>\nhm\n</think>\n\nyes"),)))
    service = turn_service(engine, chat_tokenizer, MemoryStore())
    session, dialect = new_session(), AnthropicMessages()

    async def say(messages):
        call = await service.read(
            session, dialect, WireCall(body(messages), answered_as=session.answered_as), patient_client()
        )
        return call.request, (await service.serve(call)).turn

    async with engine:
        request, first = await say([user("a")])
        [thinking, said] = dialect.answer(ModelAnswer(request, first, "m", str))["content"]
        reply = {"role": "assistant", "content": [thinking | {"thinking": text}, said]}
        _, second = await say([user("a"), reply, user("b")])

    assert thinking == {"type": "thinking", "thinking": "hm", "signature": seal(first.notes.response_id)}
    assert second.parent == parent


@pytest.mark.parametrize(("goes_to", "parent"), [("its own session", 0), ("another session", None)])
async def test_sealed_reasoning_is_known_in_its_own_session(goes_to, parent):
    """A client of Responses may keep nothing but `encrypted_content`: a key to the record, which holds no text."""
    chat_tokenizer = reasoning_tokenizer()
    engine = ScriptedEngine(chat_tokenizer.tokenizer, Script(steps=(ScriptStep(text="<think>\nhm\n</think>\n\nyes"),)))
    dialect, own, other = OpenAIResponses(), new_session(matching=("exact",)), new_session(matching=("exact",))
    services = {id(each): turn_service(engine, chat_tokenizer, MemoryStore()) for each in (own, other)}

    async def say(session, *items):
        service = services[id(session)]
        wire = WireCall(json.dumps({"input": items}).encode(), answered_as=session.answered_as)
        call = await service.read(session, dialect, wire, patient_client())
        return call.request, (await service.serve(call)).turn

    async with engine:
        request, first = await say(own, user("a"))
        await say(other, user("a"))
        [reasoning, said] = dialect.answer(ModelAnswer(request, first, "m", str))["output"]
        sealed = reasoning | {"content": []}
        _, second = await say(own if goes_to == "its own session" else other, user("a"), sealed, said, user("b"))

    assert reasoning["encrypted_content"] == seal(first.notes.response_id)
    assert second.parent == parent

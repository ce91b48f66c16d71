"""What clients make of an answer before they send it back: other names, empty arguments, references, results alone."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from harness.engines.scripted import Script, ScriptedEngine, ScriptStep
from harness.server.serving import serve
from harness.server.store.base import MemoryStore
from harness.tokens.chat_tokenizer import ChatTokenizer
from harness.types import FinishReason, Json
from tests.builders import toy_template, user
from tests.conformance.families.family import load
from tests.dialects.speakers import SPEAKERS, Speaker, asks
from tests.unit.server.test_reasoning import reasoning_tokenizer

CHAT, _, RESPONSES, GEMINI = SPEAKERS
THOUGHT = ScriptStep(text="<think>\nhm\n</think>\n\nyes")
CALL_TEXT = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
NOW: Json = {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {}}}
PATCH = {"type": "custom", "name": "patch", "format": {"type": "text"}}


class Client:
    """One session, asked over HTTP."""

    def __init__(self, http: httpx.AsyncClient, session_id: str) -> None:
        self._http = http
        self._url = f"/sessions/{session_id}"

    async def ask(self, speaker: Speaker, **body: Any) -> httpx.Response:
        return await self._http.post(f"{self._url}{speaker.path}", json={"model": "m", **body}, timeout=60)

    async def answer(self, speaker: Speaker, **body: Any) -> Json:
        got = await self.ask(speaker, **body)
        assert got.status_code == 200, got.text
        return got.json()

    async def record(self) -> Json:
        record: Json = (await self._http.get(self._url)).json()
        return record

    async def parents(self) -> list[int | None]:
        return [turn["parent"] for turn in (await self.record())["turns"]]


@asynccontextmanager
async def session_of(chat: ChatTokenizer, *steps: ScriptStep, **config: Any) -> AsyncIterator[Client]:
    engine = ScriptedEngine(chat.tokenizer, Script(steps=steps))
    async with serve(engine, chat, MemoryStore()) as server, httpx.AsyncClient(base_url=server.url, timeout=30) as http:
        session = (await http.post("/sessions", json={"matching": ["exact"], **config})).json()
        yield Client(http, session["session_id"])


def prompt_of(chat: ChatTokenizer, turn: Json) -> str:
    """What the turn added to the prompt, as text."""
    return chat.tokenizer.decode(turn["context_ids"])


def detail(text: str, kind: str = "reasoning.text") -> Json:
    return {"type": kind, "text": text, "index": 0}


ALIASES: dict[str, tuple[Json, bool]] = {
    "its own name": ({"reasoning_content": "hm"}, True),
    "reasoning": ({"reasoning": "hm"}, True),
    "reasoning beside null": ({"reasoning_content": None, "reasoning": "hm"}, True),
    "reasoning beside an empty text": ({"reasoning_content": "", "reasoning": "hm"}, True),
    "details": ({"reasoning_details": [detail("h"), detail("m")]}, True),
    "details beside null": ({"reasoning": None, "reasoning_details": [detail("hm")]}, True),
    "details without a type": ({"reasoning_details": [{"text": "hm"}]}, True),
    "all of them": ({"reasoning_content": "hm", "reasoning": "no", "reasoning_details": [detail("no")]}, True),
    "what is no text": ({"reasoning_details": [detail("hm"), {"type": "reasoning.encrypted", "data": "x"}]}, True),
    "nothing": ({}, False),
    "other words": ({"reasoning": "HM"}, False),
    "other details": ({"reasoning_details": [detail("HM")]}, False),
    "a summary": ({"reasoning_details": [{**detail("hm", "reasoning.summary"), "summary": "hm"}]}, False),
    "an object": ({"reasoning": {}}, False),
    "a list": ({"reasoning": ["hm"], "reasoning_details": "hm"}, False),
    "junk": ({"reasoning": 10**30, "reasoning_details": [None, 5, {"text": 5}, [detail("hm")]]}, False),
}


@pytest.mark.parametrize(("fields", "is_known"), ALIASES.values(), ids=ALIASES)
async def test_reasoning_is_one_field_under_each_of_its_names(fields: Json, is_known: bool):
    """`exact` tells what was said from what was not, so the reading itself is compared."""
    async with session_of(reasoning_tokenizer(), THOUGHT) as client:
        await client.answer(CHAT, messages=[user("a")])
        reply = {"role": "assistant", "content": "yes", **fields}
        await client.answer(CHAT, messages=[user("a"), reply, user("b")])

        assert await client.parents() == [None, 0 if is_known else None]


@pytest.mark.parametrize("fields", [{}, {"reasoning": "hm"}])
async def test_by_default_a_client_may_say_its_reasoning_under_any_name_or_not(fields: Json):
    """A template that shows reasoning sees the sampled ids, whatever came back."""
    async with session_of(reasoning_tokenizer(), THOUGHT, matching=[]) as client:
        await client.answer(CHAT, messages=[user("a")])
        await client.answer(CHAT, messages=[user("a"), {"role": "assistant", "content": "yes", **fields}, user("b")])

        assert await client.parents() == [None, 0]


async def test_a_whole_answer_says_its_reasoning_under_both_names_and_a_delta_under_one():
    """Clients that read deltas append both names, or refuse the second; the record has one."""
    async with session_of(reasoning_tokenizer(), THOUGHT) as client:
        whole = (await client.answer(CHAT, messages=[user("a")]))["choices"][0]["message"]
        streamed = CHAT.read((await client.ask(CHAT, messages=[user("b")], stream=True)).text, stream=True)
        replies = [turn["reply"] for turn in (await client.record())["turns"]]

    recorded = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    assert whole == {**recorded, "reasoning": "hm"}
    assert replies == [recorded, recorded]
    assert streamed == recorded


def replied_with(arguments: Any) -> Json:
    """The recorded call, with other arguments; without them for an ellipsis."""
    function = {"name": "now"} if arguments is ... else {"name": "now", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


@pytest.mark.parametrize("arguments", ["", "\n", None, " null ", ...])
async def test_empty_arguments_are_an_empty_object_in_a_prompt(arguments: Any):
    """Templates that walk over arguments refuse a text."""
    family = load("qwen3")
    async with session_of(family.chat, ScriptStep(text="yes")) as client:
        messages = [user("a"), replied_with(arguments), {"role": "tool", "tool_call_id": "c1", "content": "noon"}]
        await client.answer(CHAT, messages=messages, tools=[NOW])
        [turn] = (await client.record())["turns"]

    assert '{"name": "now", "arguments": {}}' in prompt_of(family.chat, turn)
    assert turn["messages_delta"][1]["tool_calls"][0]["function"]["arguments"] == "{}"


@pytest.mark.parametrize("speaker", SPEAKERS, ids=str)
@pytest.mark.parametrize("arguments", ["", " ", None, "null", ..., "{}"])
async def test_a_call_without_arguments_is_known_however_they_are_spelled(speaker: Speaker, arguments: Any):
    """In every dialect, to the letter."""
    async with session_of(toy_template(), ScriptStep(text=CALL_TEXT)) as client:
        asked = speaker.reply(await client.answer(speaker, **asks(speaker, [user("a")], [NOW])))
        call_id = asked["tool_calls"][0]["id"]
        result = {"role": "tool", "tool_call_id": call_id, "content": "noon"}
        body = asks(speaker, [user("a"), asked, result], [NOW])
        for holder, field in holders_of_arguments(body):
            if arguments is ...:
                del holder[field]
            else:  # Messages and Gemini have the value, the others its text
                holder[field] = (
                    {"{}": {}, "null": None}.get(arguments, arguments) if field in ("input", "args") else arguments
                )
        await client.answer(speaker, **body)

        assert await client.parents() == [None, 0]


def holders_of_arguments(value: Any) -> list[tuple[Json, str]]:
    """The objects in a body that hold the arguments of a call, and in which field."""
    if isinstance(value, list):
        return [found for each in value for found in holders_of_arguments(each)]
    if not isinstance(value, dict):
        return []
    own = [(value, "arguments")] if "arguments" in value else []
    own += [(value, "input")] if value.get("type") == "tool_use" else []
    own += [(value, "args")] if "args" in value else []
    return own + [found for each in value.values() for found in holders_of_arguments(each)]


@pytest.mark.parametrize("speaker", SPEAKERS, ids=str)
@pytest.mark.parametrize("name", ["qwen3", "toy"])
async def test_a_result_whose_call_was_never_recorded_is_rendered(speaker: Speaker, name: str):
    """Behind a recorded answer and at a root: agents that parse calls out of text have none to send."""
    chat = toy_template() if name == "toy" else load(name).chat
    async with session_of(chat, ScriptStep(text="I look.")) as client:
        reply = speaker.reply(await client.answer(speaker, **asks(speaker, [user("a")], [])))
        result = {"role": "tool", "tool_call_id": "unknown", "content": "noon"}
        await client.answer(speaker, **asks(speaker, [user("a"), reply, result], []))
        await client.answer(speaker, **asks(speaker, [user("b"), result], []))
        record = await client.record()

    assert [turn["parent"] for turn in record["turns"]] == [None, 0, None]
    assert ["noon" in prompt_of(chat, turn) for turn in record["turns"]] == [False, True, True]


async def test_a_result_without_an_id_is_rendered():
    """SGLang and vLLM take it."""
    async with session_of(toy_template(), ScriptStep(text="I look.")) as client:
        reply = CHAT.reply(await client.answer(CHAT, messages=[user("a")]))
        await client.answer(CHAT, messages=[user("a"), reply, {"role": "tool", "content": "noon"}])

        assert await client.parents() == [None, 0]


async def test_a_template_that_refuses_a_result_alone_says_so():
    """In its own words."""
    family = load("mistral_nemo")
    async with session_of(family.chat, ScriptStep(text="yes")) as client:
        got = await client.ask(CHAT, messages=[user("a"), {"role": "tool", "content": "noon"}])
        record = await client.record()

    assert got.status_code == 400
    assert "the chat template refuses these messages" in got.json()["error"]["message"]
    assert record["turns"] == []


# References to items of Responses


def referring(items: Sequence[Json]) -> list[Json]:
    """What a client sends that keeps nothing of an answer but the ids of its items."""
    return [{"type": "item_reference", "id": item["id"]} for item in items]


def output_of(call: Json) -> Json:
    """A result of the call that an item is."""
    kind = "custom_tool_call_output" if call["type"] == "custom_tool_call" else "function_call_output"
    return {"type": kind, "call_id": call["call_id"], "output": "noon"}


KINDS = ("reasoning", "message", "function_call", "custom_tool_call")
REFERRED: dict[str, tuple[str, ...]] = {
    "all of it": KINDS,
    "all but functions, as Vercel's AI SDK does": ("reasoning", "message", "custom_tool_call"),
    "the reasoning": ("reasoning",),
    "the text": ("message",),
    "the calls": ("function_call", "custom_tool_call"),
}
PATCH_TEXT = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin"}}\n</tool_call>'
WITH_ALL = ScriptStep(text=f"<think>\nhm\n</think>\n\nI look.{CALL_TEXT}{PATCH_TEXT}")
FUNCTION = {"type": "function", **NOW["function"]}


@pytest.mark.parametrize("referred", REFERRED.values(), ids=REFERRED)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_reference_is_the_item_that_it_names(referred: tuple[str, ...], stream: bool):
    """In the second call and in all those behind it, with the bytes of before and with others."""
    tools = [FUNCTION, PATCH]
    async with session_of(reasoning_tokenizer(), WITH_ALL) as client:
        sent: list[Json] = [user("a")]
        for _ in range(4):
            got = await client.ask(RESPONSES, input=sent, tools=tools, stream=stream)
            assert got.status_code == 200, got.text
            if stream:
                data = [line.removeprefix("data: ") for line in got.text.split("\n") if line.startswith("data: ")]
                items = RESPONSES.gather([json.loads(line) for line in data])["output"]
            else:
                items = got.json()["output"]
            assert tuple(item["type"] for item in items) == KINDS
            for item in items:
                sent += referring([item]) if item["type"] in referred else [item]
            sent += [output_of(item) for item in items if "call" in item["type"]]
        record = await client.record()
        again = json.loads(json.dumps(sent).replace('"item_reference"', "null"))
        await client.answer(RESPONSES, input=again, tools=tools)

        assert [turn["parent"] for turn in record["turns"]] == [None, 0, 1, 2]
        assert record["ledger"]["generated"] == record["ledger"]["trained"]
        assert (await client.parents())[-1] == 3


async def test_a_reference_may_go_on_from_an_earlier_branch():
    """The items of two answers to one question."""
    async with session_of(reasoning_tokenizer(), THOUGHT, ScriptStep(text="no")) as client:
        first = (await client.answer(RESPONSES, input=[user("a")]))["output"]
        await client.answer(RESPONSES, input=[user("a")], temperature=0.5)
        await client.answer(RESPONSES, input=[user("a"), *referring(first), user("b")])

        assert await client.parents() == [None, None, 0]


async def test_long_reasoning_may_be_sent_back_by_its_key_alone():
    """Also in messages that are known and rendered once more, because they begin a root."""
    long = [ScriptStep(text=f"<think>\n{letter * 12_000}\n</think>\n\nyes") for letter in "abcde"]
    async with session_of(reasoning_tokenizer(), *long) as client:
        sent: list[Json] = [user("a")]
        for _ in range(3):
            reasoning, message = (await client.answer(RESPONSES, input=sent))["output"]
            message["content"][0]["text"] = "edited"
            sent += [reasoning | {"content": []}, message, user("b")]
        for text in "cd":
            await client.answer(RESPONSES, input=[*sent, user(text)])
        turns = (await client.record())["turns"]

    assert [turn["parent"] for turn in turns] == [None] * 5
    assert [turn["messages_delta"][-5]["reasoning_content"] for turn in turns[3:]] == ["b" * 12_000] * 2


UNKNOWN = {
    "of nobody": "msg_" + "0" * 32,
    "of no form": "x",
    "empty": "",
    "an item that the answer has not": "fc_{0}_0",
    "a call by a wrong number": "fc_{0}_x",
    "the response": "resp_{0}",
    "the id alone": "{0}",
    "a reasoning with a number": "rs_{0}_0",
}


@pytest.mark.parametrize("item_id", UNKNOWN.values(), ids=UNKNOWN)
async def test_an_unknown_reference_is_refused_by_its_field(item_id: str):
    """Nothing is recorded, and nothing is remembered of it."""
    async with session_of(reasoning_tokenizer(), THOUGHT) as client:
        answer = await client.answer(RESPONSES, input=[user("a")])
        item_id = item_id.format(answer["id"].removeprefix("resp_"))
        body = [user("a"), {"type": "item_reference", "id": item_id}, user("b")]
        got = [await client.ask(RESPONSES, input=body) for _ in range(2)]

        assert [each.status_code for each in got] == [400, 400]
        assert got[0].json() == got[1].json()
        assert got[0].json()["error"]["param"] == "input[1].id"
        assert await client.parents() == [None]


async def test_a_reference_of_another_session_is_unknown():
    """Ids are no secret between sessions."""
    async with (
        session_of(reasoning_tokenizer(), THOUGHT) as client,
        session_of(reasoning_tokenizer(), THOUGHT) as other,
    ):
        items = (await client.answer(RESPONSES, input=[user("a")]))["output"]
        got = await other.ask(RESPONSES, input=[user("a"), *referring(items), user("b")])

    assert (got.status_code, got.json()["error"]["param"]) == (400, "input[1].id")


async def test_one_item_is_referred_to_once():
    """A reference is short and its item is long: what a body comes to is bounded by what was recorded."""
    async with session_of(reasoning_tokenizer(), THOUGHT) as client:
        items = (await client.answer(RESPONSES, input=[user("a")]))["output"]
        got = await client.ask(RESPONSES, input=[user("a"), *referring(items), user("b"), *referring(items)])

    assert (got.status_code, got.json()["error"]["param"]) == (400, "input[4].id")


async def test_an_item_of_an_aborted_answer_is_unknown():
    """No agent has got it."""
    aborted = ScriptStep(tokens=(*b"no",), finish=FinishReason.ABORT)
    async with session_of(toy_template(), ScriptStep(text="yes"), aborted) as client:
        await client.answer(RESPONSES, input=[user("a")])
        got = await client.ask(RESPONSES, input=[user("b")])
        turns = (await client.record())["turns"]
        item_id = f"msg_{turns[1]['notes']['response_id']}"
        again = await client.ask(RESPONSES, input=[user("b"), {"type": "item_reference", "id": item_id}, user("c")])

    assert turns[1]["status"] == "aborted", got.text
    assert (again.status_code, again.json()["error"]["param"]) == (400, "input[1].id")

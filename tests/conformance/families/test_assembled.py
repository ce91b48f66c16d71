"""Families that are put together of parts say what OpenAI's own libraries and published examples say.

`openai_harmony` is the maker's renderer of gpt-oss. It accepts a vocabulary only with the checksum that it knows, so a
vocabulary that comes out of the npm package and is accepted is the maker's, bit by bit. `tiktoken` reads cl100k_base.
"""

import base64
import hashlib
import json

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from openai_harmony import (
    Author,
    Conversation,
    DeveloperContent,
    HarmonyEncodingName,
    Message,
    Role,
    SystemContent,
    ToolDescription,
    load_harmony_encoding,
)

from harness.tokens.chat_tokenizer import SampledOutput
from harness.tokens.conversations import TEXTS, TOOLS
from tests.conformance.families.family import load
from tests.conformance.families.sampling import CONTENTS
from tests.thoroughness import examples

GPT_OSS = pytest.mark.parametrize("family", ["gpt_oss-ours"], indirect=True)
PHI4 = pytest.mark.parametrize("family", ["phi4-ours"], indirect=True)
CL100K_SHA256 = "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"
"""Of the file `cl100k_base.tiktoken`, as `tiktoken` states it."""

USER = {"role": "user", "content": "question"}
RULES = {"role": "system", "content": "rules"}
CALL = {"id": "call_0", "type": "function", "function": {"name": "find_city", "arguments": '{"country": "France"}'}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_0", "content": "Paris"}
ANSWER = {"role": "assistant", "content": "answer"}
LOOKING = {**CALLING, "reasoning_content": "I have to look."}


def ranks_of(family) -> dict[bytes, int]:
    """The vocabulary without its added tokens, as bytes."""
    described = json.loads((family.folder / "tokenizer.json").read_bytes())
    added = {token["id"] for token in described["added_tokens"]}
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    bytes_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
    vocabulary = described["model"]["vocab"].items()
    return {bytes(map(bytes_of.__getitem__, text)): rank for text, rank in vocabulary if rank not in added}


def as_file(ranks: dict[bytes, int]) -> bytes:
    """The vocabulary in the format that OpenAI publishes."""
    ordered = sorted(ranks.items(), key=lambda item: item[1])
    return b"".join(b"%s %d\n" % (base64.b64encode(text), rank) for text, rank in ordered)


@pytest.fixture(name="makers", scope="module")
def _makers(tmp_path_factory):
    """The maker's encoding of gpt-oss, on the vocabulary of the package."""
    folder = tmp_path_factory.mktemp("vocabulary")
    (folder / "o200k_base.tiktoken").write_bytes(as_file(ranks_of(load("gpt_oss-ours"))))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TIKTOKEN_ENCODINGS_BASE", str(folder))
        return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)


def by_maker(makers, messages, tools) -> str:
    """The prompt as the maker's library writes it."""
    leads = bool(messages) and messages[0]["role"] in ("system", "developer")
    system = SystemContent.new().with_conversation_start_date("2025-01-01")
    said = [Message.from_role_and_content(Role.SYSTEM, system)]
    if leads or tools:
        developer = DeveloperContent.new()
        if leads:
            developer = developer.with_instructions(messages[0]["content"])
        if tools:
            functions = [tool["function"] for tool in tools]
            developer = developer.with_function_tools(
                [ToolDescription.new(each["name"], each["description"], each["parameters"]) for each in functions]
            )
        said.append(Message.from_role_and_content(Role.DEVELOPER, developer))
    for message in messages[leads:]:
        if message["role"] == "tool":
            author = Author.new(Role.TOOL, "functions.find_city")
            result = Message.from_author_and_content(author, message["content"])
            said.append(result.with_recipient("assistant").with_channel("commentary"))
            continue
        role = Role(message["role"])
        if message.get("reasoning_content"):
            said.append(Message.from_role_and_content(role, message["reasoning_content"]).with_channel("analysis"))
        for call in message.get("tool_calls", ()):
            made = Message.from_role_and_content(role, call["function"]["arguments"])
            addressed = made.with_recipient("functions.find_city").with_channel("commentary")
            said.append(addressed.with_content_type("<|constrain|>json"))
        if message["content"]:
            plain = Message.from_role_and_content(role, message["content"])
            said.append(plain if role is Role.USER else plain.with_channel("final"))
    ids = makers.render_conversation_for_completion(Conversation.from_messages(said), Role.ASSISTANT)
    return makers.decode(ids)


@GPT_OSS
class TestGptOss:
    """Harmony."""

    @pytest.mark.parametrize(
        "messages",
        [
            [USER],
            [RULES, USER],
            [USER, ANSWER, USER],
            [RULES, USER, CALLING, RESULT],
            [USER, LOOKING, RESULT],
            [RULES, USER, LOOKING, RESULT, LOOKING, RESULT],
        ],
        ids=len,
    )
    @pytest.mark.parametrize("tools", [(), TOOLS], ids=["plain", "tools"])
    def test_a_prompt_is_the_makers_but_for_the_end_of_an_answer(self, family, makers, messages, tools):
        """Identity, date, channels, tools, calls, results: all of it."""
        ours = family.chat.tokenizer.decode(family.chat.render_ids(messages, tools))

        assert ours.replace("<|return|>", "<|end|>") == by_maker(makers, messages, tools)

    def test_ids_are_the_makers(self, family, makers):
        """Texts of every kind, also inside a prompt."""
        for text in TEXTS:
            assert family.chat.tokenizer.encode_plain(text) == makers.encode(text, disallowed_special=())
        prompt = family.chat.render_ids([RULES, USER, LOOKING, RESULT], TOOLS)
        assert prompt == makers.encode(family.chat.tokenizer.decode(prompt), allowed_special="all")

    @pytest.mark.parametrize(
        ("schema", "written"),
        [
            ({"type": "string", "enum": ["a", "b"], "default": "a"}, 'x?: "a" | "b", // default: a'),
            ({"type": "integer"}, "x?: number,"),
            ({"type": "array", "items": {"type": "string"}}, "x?: string[],"),
            ({"type": "array"}, "x?: Array<any>,"),
            ({"type": "boolean", "default": True}, "x?: boolean, // default: true"),
            ({"type": "number", "nullable": True, "default": 1.5}, "x?: number | null, // default: 1.5"),
            ({"type": ["string", "null"]}, "x?: string | null,"),
            ({"type": "string", "description": "Said."}, "// Said.\nx?: string,"),
            ({}, "x?: any,"),
        ],
        ids=str,
    )
    def test_an_argument_is_written_as_the_maker_writes_it(self, family, makers, schema, written):
        """JSON Schema as types of TypeScript."""
        tool = {"name": "find", "description": "", "parameters": {"type": "object", "properties": {"x": schema}}}
        tools = [{"type": "function", "function": tool}]
        ours = family.chat.tokenizer.decode(family.chat.render_ids([USER], tools))

        assert f"type find = (_: {{\n{written}\n}}) => any;" in ours
        assert ours == by_maker(makers, [USER], tools)

    def test_objects_inside_of_arguments_keep_their_descriptions(self, family):
        """Where the maker's has spaces of its own; lists of choices are put in parentheses."""
        place = {"type": "object", "properties": {"a": {"type": "string", "description": "Said."}}, "required": ["a"]}
        choices = {"type": "array", "items": {"anyOf": [{"type": "string"}, place]}}
        parameters = {"type": "object", "properties": {"place": place, "many": choices}}
        tools = [{"type": "function", "function": {"name": "find", "description": "", "parameters": parameters}}]
        ours = family.chat.tokenizer.decode(family.chat.render_ids([USER], tools))

        assert "place?: {\n// Said.\na: string,\n}," in ours
        assert "many?: (string | {\n// Said.\na: string,\n})[]," in ours

    def test_reasoning_of_an_answered_question_stays(self, family, makers):
        """The maker's drops it, so that no later prompt begins with an earlier one."""
        messages = [USER, {**ANSWER, "reasoning_content": "hm"}, USER]
        ours = family.chat.tokenizer.decode(family.chat.render_ids(messages, ()))

        assert "<|channel|>analysis<|message|>hm<|end|>" in ours
        assert "hm" not in by_maker(makers, messages, ()).partition("question")[2]

    def test_a_result_is_said_to_be_of_the_tool_that_was_called(self, family):
        """By its id; the name is not in OpenAI's result messages."""
        calls = [{**CALL, "id": str(i), "function": {**CALL["function"], "name": f"tool_{i}"}} for i in range(2)]
        results = [{"role": "tool", "tool_call_id": str(i), "content": f"result {i}"} for i in (1, 0)]
        ours = family.chat.tokenizer.decode(
            family.chat.render_ids([USER, {**CALLING, "tool_calls": calls}, *results], ())
        )

        for i in range(2):
            assert f"<|start|>functions.tool_{i} to=assistant<|channel|>commentary<|message|>result {i}" in ours

    def test_an_answer_is_read_without_tools_too(self, family):
        """Channels are around every answer; a call that nobody offers is what it says."""
        tokenizer = family.chat.tokenizer
        call = "<|channel|>commentary to=functions.x <|constrain|>json<|message|>{}<|call|>"

        def read(text: str):
            return family.chat.parse(SampledOutput(tokenizer.encode(text)), ())

        assert read("<|channel|>final<|message|>yes<|return|>").content == "yes"
        assert (read(call).content, read(call).tool_calls) == (call, ())


@PHI4
class TestPhi4:
    """cl100k_base with markers."""

    def test_the_vocabulary_is_cl100k_base(self, family):
        """Bit by bit."""
        assert hashlib.sha256(as_file(ranks_of(family))).hexdigest() == CL100K_SHA256

    def test_markers_are_at_the_ids_that_are_published(self, family):
        """The ids of a question, and the size of the embedding."""
        tokenizer = family.chat.tokenizer
        asked = [{"role": "user", "content": "Who are you?"}]

        assert family.chat.render_ids(asked, ()) == [
            *(100264, 882, 100266, 15546, 527, 499, 30, 100265),
            *(100264, 78191, 100266),
        ]
        assert tokenizer.vocab_size == 100352
        assert [tokenizer.marker_id(f"<|dummy_{i}|>") for i in (0, 1, 12, 87)] == [100256, 100261, 100275, 100351]

    def test_ids_are_those_of_tiktoken(self, family):
        """For any text."""
        described = json.loads((family.folder / "tokenizer.json").read_bytes())
        pattern = described["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
        theirs = tiktoken.Encoding("phi4", pat_str=pattern, mergeable_ranks=ranks_of(family), special_tokens={})

        @settings(max_examples=examples(100), deadline=None)
        @given(st.one_of(CONTENTS, st.sampled_from(TEXTS)))
        def is_the_same(text: str) -> None:
            assert family.chat.tokenizer.encode_plain(text) == theirs.encode(text, disallowed_special=())

        is_the_same()

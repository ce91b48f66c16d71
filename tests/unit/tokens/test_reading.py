"""Reasoning, tool calls and content out of ids: by marker ids where there are any, and never an exception."""

import json
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken

from harness.tokens.chat_tokenizer import SampledOutput
from harness.tokens.output_reader import OutputReader, call_syntax_of
from harness.tokens.parsing import CallSyntax, ParsedOutput, ToolCall
from harness.tokens.syntaxes.harmony import Harmony
from harness.tokens.syntaxes.json_calls import LlamaJson, Mistral, MistralNamed
from harness.tokens.syntaxes.marked_calls import (
    APERTUS,
    COHERE,
    DEEPSEEK,
    DEEPSEEK_3_1,
    DSML_CALLS,
    DSML_TOOLS,
    GEMMA,
    GLM,
    HERMES,
    KIMI,
    LISTED,
    MINIMAX,
    NEMOTRON,
    QWEN,
    SEED,
    MarkedCalls,
)
from harness.tokens.tokenizer import Tokenizer
from tests.builders import tool, toy_tokenizer

MARKERS = ["<think>", "</think>", *HERMES.markers, *Harmony.markers, *Mistral.markers, *DEEPSEEK.markers]
ADD = tool("add", properties={"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "boolean"}})
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CALLED = ToolCall("add", '{"a": 1}')


def marked_tokenizer() -> Tokenizer:
    """The toy tokenizer with an id for every marker, as Qwen and gpt-oss have them."""
    raw = type(toy_tokenizer()._raw).from_str(toy_tokenizer()._raw.to_str())
    raw.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    ends = frozenset(raw.token_to_id(text) for text in ("<|im_end|>", "<|call|>", "<|return|>"))
    return Tokenizer(raw, eos_ids=ends).guarding(MARKERS)


TOKENIZER = marked_tokenizer()
TAGGED = (GLM, SEED, MINIMAX, DSML_CALLS)
SYNTAXES: list[CallSyntax] = [HERMES, QWEN, Harmony(), Mistral(), MistralNamed(), DEEPSEEK, LlamaJson(), GEMMA, *TAGGED]


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def spelled(text: str) -> list[int]:
    """`text` with every marker spelled out in ordinary characters."""
    return TOKENIZER.encode_plain(text)


def read(text: str | list[int], syntax: CallSyntax | None = None, *, context: str = "", tools=(ADD,)) -> ParsedOutput:
    output = SampledOutput(ids(text) if isinstance(text, str) else text, ids(context))
    return OutputReader(TOKENIZER, syntax or HERMES).read(output, list(tools))


@pytest.mark.parametrize(
    ("text", "context", "parsed"),
    [
        ("<think>\nhm\n</think>\n\nyes", "", ParsedOutput("yes", reasoning="hm")),
        ("hm\n</think>\n\nyes", "<think>\n", ParsedOutput("yes", reasoning="hm")),
        ("yes", "<think>\n\n</think>\n\n", ParsedOutput("yes")),
        ("<think>cut off", "", ParsedOutput("", reasoning="cut off")),
        ("cut off", "<think>\n", ParsedOutput("", reasoning="cut off")),
        ("<think>\n\n</think>\n\nyes", "", ParsedOutput("yes")),
        (f"<think>hm</think>{CALL}", "", ParsedOutput("", (CALLED,), reasoning="hm")),
        (f"<think>hm {CALL} no</think>yes", "", ParsedOutput("yes", reasoning=f"hm {CALL} no")),
        (f"<think>never closed\n{CALL}", "", ParsedOutput("", (CALLED,), reasoning="never closed")),
        ("<think>a <think> b</think>c</think>d", "", ParsedOutput("c</think>d", reasoning="a <think> b")),
        ("yes <think>late</think>", "", ParsedOutput("yes <think>late</think>")),
        ("</think>yes", "", ParsedOutput("</think>yes")),
        ("hm</think>yes", "<think>\n<|im_end|>\n", ParsedOutput("hm</think>yes")),
    ],
)
def test_reasoning_is_taken_out_of_the_content(text, context, parsed):
    """Between the markers, wherever it began; a call drafted in closed reasoning is no call."""
    assert read(text, context=context) == parsed


def with_added(*texts: str) -> Tokenizer:
    """Return the toy tokenizer with these added tokens."""
    raw = type(toy_tokenizer()._raw).from_str(toy_tokenizer()._raw.to_str())
    raw.add_tokens([AddedToken(text, special=False, normalized=False) for text in texts])
    return Tokenizer(raw, eos_ids=toy_tokenizer().eos_ids)


GEMMA4 = "<|channel>thought"


@pytest.mark.parametrize("has_ids", [True, False], ids=["ids", "spelled"])
@pytest.mark.parametrize(
    ("begin", "end"),
    [
        ("<think>", "</think>"),
        ("[THINK]", "[/THINK]"),
        ("<seed:think>", "</seed:think>"),
        ("<mm:think>", "</mm:think>"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<|inner_prefix|>", "<|inner_suffix|>"),
        ("◁think▷", "◁/think▷"),
        (GEMMA4, "<channel|>"),
    ],
)
def test_reasoning_is_read_between_the_markers_of_each_family(begin, end, has_ids):
    """As ids or spelled out, begun by the model or by the prompt, whole or id by id."""
    tokenizer = with_added(*(text for text in (begin, end) if has_ids and text != GEMMA4))
    reader = OutputReader(tokenizer, HERMES, f"{{{{ '{begin}' }}}} and {end}")

    def read_behind(context: str, text: str) -> ParsedOutput:
        output = SampledOutput(tokenizer.encode(text), tokenizer.encode(context))
        stream = reader.open(output, [ADD])
        for token_id in output.ids:
            stream.push([token_id])
        assert stream.end() == reader.read(output, [ADD])
        return reader.read(output, [ADD])

    prompt = "<|im_start|>assistant\n"
    assert read_behind(prompt, f"{begin}\nhm\n{end}\n\nyes") == ParsedOutput("yes", reasoning="hm")
    assert read_behind(f"{prompt}{begin}\n", f"hm{end}yes") == ParsedOutput("yes", reasoning="hm")
    assert read_behind(f"{prompt}{begin}{end}", "yes") == ParsedOutput("yes")
    assert read_behind(prompt, f"{begin}hm{end}{CALL}") == ParsedOutput("", (CALLED,), reasoning="hm")


def test_no_reasoning_is_open_where_the_family_has_none():
    """Whatever the prompt ends in."""
    reader = OutputReader(toy_tokenizer(), HERMES)

    assert not reader.ends_in_reasoning(toy_tokenizer().encode("say <think>"))


@pytest.mark.parametrize(
    ("output", "parsed"),
    [
        ("<|START_RESPONSE|>yes\n<|END_RESPONSE|>", ParsedOutput("yes\n")),
        ("yes<|END_RESPONSE|>", ParsedOutput("yes")),
        ("<|START_RESPONSE|>cut", ParsedOutput("cut")),
        (
            "<|START_THINKING|>x<|END_THINKING|><|START_RESPONSE|>yes<|END_RESPONSE|>",
            ParsedOutput("yes", reasoning="x"),
        ),
        ("<|START_THINKING|>x<|START_RESPONSE|>yes<|END_RESPONSE|>", ParsedOutput("yes", reasoning="x")),
        ("<|START_TEXT|>yes<|END_TEXT|>", ParsedOutput("yes")),
        (f"{CALL}<|END_RESPONSE|>", ParsedOutput("", (CALLED,))),
        ("<|START_RESPONSE|>yes<|END_RESPONSE|>\n", ParsedOutput("yes")),
        ("yes<|END_RESPONSE|> no", ParsedOutput("yes<|END_RESPONSE|> no")),
        ("a<|END_RESPONSE|>b<|START_RESPONSE|>", ParsedOutput("a<|END_RESPONSE|>b<|START_RESPONSE|>")),
    ],
)
def test_the_markers_around_an_answer_are_no_content(output, parsed):
    """As Cohere's models write them; inside the answer they stay."""
    names = ("START_THINKING", "END_THINKING", "START_RESPONSE", "END_RESPONSE", "START_TEXT", "END_TEXT")
    tokenizer = with_added(*(f"<|{name}|>" for name in names))
    reader = OutputReader(tokenizer, HERMES)
    stream = reader.open(SampledOutput(()), [ADD])
    said = [stream.push([token_id]) for token_id in tokenizer.encode(output)]

    assert reader.read(SampledOutput(tokenizer.encode(output)), [ADD]) == parsed == stream.end()
    assert parsed.content.startswith("".join(delta.content for delta in said))


@pytest.mark.parametrize("text", ["<think>hm</think>yes", CALL, f"</tool_call>{CALL}"])
def test_markers_spelled_out_in_characters_are_text(text):
    """A model that copies a message into its answer neither reasons nor calls: only ids count."""
    assert read(spelled(text)) == ParsedOutput(text)


def test_a_call_copied_into_arguments_is_part_of_them():
    """The text of a marker inside a string does not end the call."""
    copied = json.dumps({"name": "add", "arguments": {"b": "</tool_call>"}})

    parsed = read([*ids("<tool_call>"), *spelled(copied), *ids("</tool_call>")])

    assert parsed.tool_calls == (ToolCall("add", '{"b": "</tool_call>"}'),)


@pytest.mark.parametrize(
    ("text", "syntax", "arguments"),
    [
        ('<tool_call>{"name": "add", "arguments": {"b": "</tool_call> x"}}</tool_call>', HERMES, "</tool_call> x"),
        ('<tool_call>{"name": "add", "arguments": {"b": "\\"</tool_call>"}}</tool_call>', HERMES, '"</tool_call>'),
        ('<tool_call>{"name": "add", "arguments": {"b": "<tool_call>"}}</tool_call>', HERMES, "<tool_call>"),
        (
            "<tool_call>\n<function=add>\n<parameter=b>\na </tool_call> b\n</parameter>\n</function>\n</tool_call>",
            QWEN,
            "a </tool_call> b",
        ),
        ('[TOOL_CALLS][{"name": "add", "arguments": {"b": "[TOOL_CALLS]"}}]', Mistral(), "[TOOL_CALLS]"),
        ('[TOOL_CALLS]add[ARGS]{"b": "[TOOL_CALLS]sub[ARGS]"}', MistralNamed(), "[TOOL_CALLS]sub[ARGS]"),
    ],
)
def test_a_marker_inside_a_value_ends_nothing(text, syntax, arguments):
    """As one id: the end of the object decides."""
    [called] = read(text, syntax).tool_calls

    assert json.loads(called.arguments) == {"b": arguments}


@pytest.mark.parametrize("syntax", [HERMES, QWEN], ids=lambda syntax: syntax.name)
def test_ends_inside_a_value_are_read_in_one_pass(syntax):
    """A model that repeats the marker for its whole budget."""
    begin = '<tool_call>{"s": "' if syntax.name == "hermes" else "<tool_call><function=f><parameter=p>"
    output = ids(begin) + [TOKENIZER.marker_id("</tool_call>")] * 50_000
    began = time.thread_time()

    assert read(output, syntax).malformed
    assert time.thread_time() - began < 10


def test_without_tools_the_output_is_content_but_its_reasoning_is_not():
    assert read(f"<think>hm</think>{CALL}", tools=()) == ParsedOutput(CALL, reasoning="hm")


def test_a_forced_beginning_is_part_of_the_call():
    """The prompt began the call and the model finished it."""
    reader = OutputReader(TOKENIZER, HERMES)
    output = SampledOutput(ids('{"a": 1}}\n</tool_call>'), forced_ids=reader.call_beginning_ids("add"))

    assert reader.read(output, [ADD]) == ParsedOutput("", (CALLED,))


def test_a_stop_string_may_be_a_marker():
    """What it cut off is no call: the agent wanted the text before it."""
    reader = OutputReader(TOKENIZER, HERMES)

    assert reader.read(SampledOutput(ids("a<tool_call>"), stop="<tool_call>"), [ADD]) == ParsedOutput("a")


XML = "<tool_call>\n<function=add>\n{}</function>\n</tool_call>"


def parameter(name: str, value: str) -> str:
    return f"<parameter={name}>\n{value}\n</parameter>\n"


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        ("", {}),
        (parameter("a", "1"), {"a": 1}),
        (parameter("a", "one"), {"a": "one"}),
        (parameter("a", "null"), {"a": None}),
        (parameter("b", "1"), {"b": "1"}),
        (parameter("b", "\n x \n"), {"b": "\n x \n"}),
        (parameter("c", "True"), {"c": True}),
        (parameter("b", '<a href="x">'), {"b": '<a href="x">'}),
        (parameter("unknown", "1"), {"unknown": "1"}),
        (parameter("a", "1") + parameter("b", "x"), {"a": 1, "b": "x"}),
    ],
)
def test_qwen_parameters_are_typed_by_the_schema(parameters, arguments):
    """Text stays text; what the schema calls a number or a boolean is one when it can be."""
    [call] = read(XML.replace("{}", parameters), QWEN).tool_calls

    assert (call.name, json.loads(call.arguments)) == ("add", arguments)


SCHEMAS = {
    "optional": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "tags": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
    "name": {"oneOf": [{"type": "string"}, {"type": "null"}]},
    "at": {"$ref": "#/$defs/P"},
    "level": {"enum": [1, 2, 3]},
    "word": {"enum": ["1", "2"]},
    "both": {"allOf": [{"$ref": "#/$defs/N"}, {"description": "narrower"}]},
    "free": {"description": "anything"},
    "fixed": {"const": 4},
    "again": {"$ref": "#/$defs/Again"},
    "place": {"properties": {"x": {"type": "integer"}}},
    "kinds": {"type": ["integer", "array"]},
    "maybe": {"type": "boolean", "nullable": True},
    "flag": {"type": "bool"},
    "label": {"type": "str"},
    "odd": {"type": {"a": 1}},
    "sizes": {"type": ["list", "null"]},
}
DEFINED = {
    "P": {"type": "object"},
    "N": {"type": ["number", "string"]},
    "Again": {"anyOf": [{"$ref": "#/$defs/Again"}, {"type": "integer"}]},
}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("optional", "20", 20),
        ("optional", "null", None),
        ("optional", "None", None),
        ("optional", "many", "many"),
        ("tags", '["x"]', ["x"]),
        ("tags", "null", None),
        ("name", "null", None),
        ("name", "20", "20"),
        ("at", '{"x": 1}', {"x": 1}),
        ("level", "2", 2),
        ("word", "2", "2"),
        ("both", "1.5", 1.5),
        ("both", "x", "x"),
        ("free", "20", 20),
        ("free", "twenty", "twenty"),
        ("fixed", "4", 4),
        ("again", "1", 1),
        ("place", '{"x": 1}', {"x": 1}),
        ("kinds", "[1]", [1]),
        ("maybe", "False", False),
        ("maybe", "null", None),
        ("optional", "NULL", None),
        ("name", "NULL", None),
        ("name", '"quoted"', '"quoted"'),
        ("free", '"quoted"', '"quoted"'),
        ("both", '"1"', '"1"'),
        ("flag", "true", True),
        ("label", "20", "20"),
        ("odd", "20", 20),
        ("sizes", "[1]", [1]),
    ],
)
def test_a_qwen_parameter_is_typed_by_the_whole_schema(name, text, value):
    """Choices, references, values that are listed, no type at all; also where the properties are referred to."""
    for parameters in (
        {"type": "object", "properties": SCHEMAS, "$defs": DEFINED},
        {"$ref": "#/$defs/All", "$defs": DEFINED | {"All": {"allOf": [{"properties": SCHEMAS}]}}},
        {"additionalProperties": SCHEMAS[name], "$defs": DEFINED},
    ):
        tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
        [called] = read(XML.replace("{}", parameter(name, text)), QWEN, tools=tools).tool_calls

        read_as = json.loads(called.arguments)[name]
        assert (type(read_as), read_as) == (type(value), value)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n<function=add>\n",
        "<tool_call>add</tool_call>",
        "<tool_call><function=></function></tool_call>",
        XML.replace("{}", "<parameter=a>\n1\n"),
        XML.replace("{}", parameter("a", "1") * 2),
        XML.replace("{}", parameter("a", "<parameter=b>")),
        XML.replace("{}", "loose"),
        XML.replace("{}", XML.replace("{}", "")),
        XML.replace("{}", "") + "<tool_call>",
    ],
)
def test_a_malformed_qwen_call_is_content_and_said_so(text):
    """Cut off, nested, named twice: the agent reads what the model wrote."""
    assert read(text, QWEN) == ParsedOutput(text, malformed=True)


def invoked(tag: str, text: str = "") -> str:
    values = {"a": "1", "free": "[1]", "optional": "null"}
    said = "".join(f'<{tag}parameter name="{name}"{text}>{each}</{tag}parameter>\n' for name, each in values.items())
    said += f'<{tag}parameter name="b"{text.replace("false", "true")}>1</{tag}parameter>\n'
    return f'\n<{tag}invoke name="add">\n{said}</{tag}invoke>\n<{tag}invoke name="now">\n</{tag}invoke>\n'


def paired(between: str) -> str:
    values = {"a": "1", "b": "1", "free": "[1]", "optional": "null"}
    pairs = (f"<arg_key>{name}</arg_key>{between}<arg_value>{text}</arg_value>" for name, text in values.items())
    return between.join(["add", *pairs, ""])


DEEPSEEK_SEPARATOR = DEEPSEEK.begin.replace("call\N{LOWER ONE EIGHTH BLOCK}begin", "sep")
DSML = DSML_CALLS.begin.removeprefix("<").removesuffix("function_calls>")
SAID = {"a": 1, "b": "1", "free": [1], "optional": None}
LIST = f'[{{"name": "add", "arguments": {json.dumps(SAID)}}}, {{"name": "now", "arguments": {{}}}}]'
BY_TAGS = "".join(parameter(*each) for each in (("a", "1"), ("b", "1"), ("free", "[1]"), ("optional", "null")))
KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
OPTIONAL = {"optional": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}
FAMILY_CALLS: list[tuple[MarkedCalls, list[str]]] = [
    (SEED, [f"<function=add>\n{BY_TAGS}</function>", "<function=now></function>"]),
    (GLM, [paired("\n"), "now\n"]),
    (GLM, [paired(""), "now"]),
    (MINIMAX, [invoked("")]),
    (DSML_CALLS, [invoked(DSML, ' string="false"')]),
    (DSML_TOOLS, [invoked(DSML, ' string="false"')]),
    (LISTED, [LIST]),
    (LISTED, [LIST.replace("}, {", "}\n{").strip("[]")]),
    (NEMOTRON, [LIST]),
    (COHERE, [LIST.replace('"name"', '"tool_call_id": "0", "tool_name"').replace("arguments", "parameters")]),
    (APERTUS, [f'[{{"add": {json.dumps(SAID)}}}, {{"now": {{}}}}]']),
    (GEMMA, ['call:add{a:1,b:<|"|>1<|"|>,free:[1],optional:None}', "call:now{}"]),
    (DEEPSEEK_3_1, [f"add{DEEPSEEK_SEPARATOR}{json.dumps(SAID)}", f"now{DEEPSEEK_SEPARATOR}{{}}"]),
    (KIMI, [f"functions.add:0{KIMI_ARGUMENTS}{json.dumps(SAID)}", f"functions.now:1{KIMI_ARGUMENTS}{{}}"]),
]


@pytest.mark.parametrize(("syntax", "blocks"), FAMILY_CALLS, ids=lambda each: getattr(each, "name", "calls"))
def test_calls_of_each_family_are_typed(syntax, blocks):
    """Several, without arguments, with numbers that are text; cut off anywhere nothing is lost."""
    tools = [tool("add", properties={"a": {"type": "integer"}, "b": {"type": "string"}, "free": {}, **OPTIONAL})]
    framed = "".join(f"{syntax.begin}{block}{syntax.end}" for block in blocks)
    text = framed.join(syntax.around or ("", ""))

    first, second = read(f"so\n{text}", syntax, tools=[*tools, tool("now")]).tool_calls

    assert (first.name, json.loads(first.arguments), second) == ("add", SAID, ToolCall("now", "{}"))
    for end in range(len(text)):
        cut = read(text[:end], syntax, tools=[*tools, tool("now")])
        assert cut.tool_calls in ((), (first,), (first, second))
        assert cut.tool_calls or cut.content == text[:end]
        assert cut.malformed == (text[:end].count(syntax.begin) > text[:end].count(syntax.end))


@pytest.mark.parametrize(
    ("syntax", "rest"),
    [
        *[(SEED, "</function>\n"), (GLM, ""), (MINIMAX, "</invoke>\n"), (DSML_TOOLS, f"</{DSML}invoke>\n")],
        *[(syntax, "{}}]") for syntax in (LISTED, NEMOTRON, COHERE, APERTUS)],
        *[(GEMMA, "}"), (DEEPSEEK, "{}\n```"), (DEEPSEEK_3_1, "{}"), (KIMI, "{}")],
    ],
    ids=lambda each: getattr(each, "name", "rest"),
)
def test_a_required_call_begins_as_its_family_writes_it(syntax, rest):
    """The prompt has it up to the arguments, so the model cannot call another tool."""
    reader = OutputReader(TOKENIZER, syntax)
    output = SampledOutput(TOKENIZER.encode(f"{rest}{syntax.end}"), forced_ids=reader.call_beginning_ids("now"))

    assert reader.read(output, [tool("now")]) == ParsedOutput("", (ToolCall("now", "{}"),))


def test_an_argument_that_quotes_a_head_belongs_to_its_call():
    quoting = f'{{"b":"functions.now:1{KIMI_ARGUMENTS}{{}}"}}'

    [called] = read(f"{KIMI.begin}functions.add:0{KIMI_ARGUMENTS}{quoting}{KIMI.end}", KIMI).tool_calls

    assert (called.name, json.loads(called.arguments)) == ("add", json.loads(quoting))


def test_a_value_that_says_whether_it_is_text_is_what_it_says():
    """DeepSeek V3.2's, also of parameters that the schema lacks."""
    said = invoked(DSML, ' string="false"')
    tools = [tool("add", properties={}), tool("now")]

    [called, _] = read(f"{DSML_CALLS.begin}{said}{DSML_CALLS.end}", DSML_CALLS, tools=tools).tool_calls

    assert json.loads(called.arguments) == SAID


FINAL = "<|channel|>final<|message|>yes<|return|>"
HARMONY_CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        (FINAL, ParsedOutput("yes")),
        (f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{FINAL}", ParsedOutput("yes", reasoning="hm")),
        (HARMONY_CALL, ParsedOutput("", (CALLED,))),
        (
            '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>',
            ParsedOutput("", (CALLED,)),
        ),
        (
            f"<|channel|>commentary<|message|>first<|end|><|start|>assistant{HARMONY_CALL}",
            ParsedOutput("first", (CALLED,)),
        ),
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
            + HARMONY_CALL.replace("commentary", "analysis"),
            ParsedOutput("", (CALLED,), reasoning="hm"),
        ),
        ("<|channel|>final<|message|>cut", ParsedOutput("cut")),
        ("<|channel|>analysis<|message|>cut", ParsedOutput("", reasoning="cut")),
    ],
)
def test_harmony_channels_are_reasoning_content_and_calls(text, parsed):
    """The prompt ended with `<|start|>assistant`."""
    assert read(text, Harmony()) == parsed


@pytest.mark.parametrize(
    "text",
    [
        "no channel",
        "<|channel|>final",
        "<|channel|>secret<|message|>x<|end|>",
        "<|channel|><|message|>x<|end|>",
        HARMONY_CALL.removesuffix("<|call|>"),
        HARMONY_CALL.replace('{"a": 1}', '{"a": '),
        HARMONY_CALL.replace("<|call|>", "<|end|>"),
        HARMONY_CALL.replace("functions.add", "python"),
    ],
)
def test_malformed_harmony_is_content_and_said_so(text):
    assert read(text, Harmony()) == ParsedOutput(text, malformed=True)


def test_messages_before_a_malformed_one_are_what_they_are():
    """An agent may have read them while the rest was sampled."""
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    rest = f"<|start|>user{FINAL}"

    assert read(f"{thought}{FINAL}{rest}", Harmony()) == ParsedOutput(f"yes\n{rest}", (), True, "hm")


DEEPSEEK_CALL = f'function{DEEPSEEK_SEPARATOR}add\n```json\n{{"a": 1}}\n```'
BEGIN, END, CALL_BEGIN, CALL_END = DEEPSEEK.markers


@pytest.mark.parametrize(
    ("text", "syntax", "parsed"),
    [
        (
            '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "123456789"}]',
            Mistral(),
            ParsedOutput("", (CALLED,)),
        ),
        ('so[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]', Mistral(), ParsedOutput("so", (CALLED,))),
        ('[TOOL_CALLS]add[ARGS]{"a": 1}', MistralNamed(), ParsedOutput("", (CALLED,))),
        ('so[TOOL_CALLS]add[CALL_ID]9[ARGS] {"a": 1}\n', Mistral(), ParsedOutput("so", (CALLED,))),
        (
            '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]sub[ARGS]{}',
            MistralNamed(),
            ParsedOutput("", (CALLED, ToolCall("sub", "{}"))),
        ),
        ('{"name": "add", "parameters": {"a": 1}}', LlamaJson(), ParsedOutput("", (CALLED,))),
        ('{"type": "function", "name": "add", "arguments": {"a": 1}}', LlamaJson(), ParsedOutput("", (CALLED,))),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1}}', LlamaJson(), ParsedOutput("", (CALLED,))),
        ('so\n<|python_tag|> {"name": "add", "parameters": {"a": 1}}', LlamaJson(), ParsedOutput("so", (CALLED,))),
        (f"so{BEGIN}{CALL_BEGIN}{DEEPSEEK_CALL}{CALL_END}{END}", DEEPSEEK, ParsedOutput("so", (CALLED,))),
    ],
)
def test_other_families_have_their_own_syntax(text, syntax, parsed):
    """Mistral, Llama 3 and DeepSeek V3, as their templates render calls."""
    assert read(text, syntax) == parsed


@pytest.mark.parametrize(
    ("text", "syntax"),
    [
        ("[TOOL_CALLS]", Mistral()),
        ("[TOOL_CALLS][]", Mistral()),
        ('[TOOL_CALLS][{"name": "add"', Mistral()),
        ('[TOOL_CALLS][{"name": "add"}][TOOL_CALLS]', Mistral()),
        ('[TOOL_CALLS]add[ARGS]{"a": 1} and so on', MistralNamed()),
        ('[TOOL_CALLS]add[ARGS]{"a": ', MistralNamed()),
        ("[TOOL_CALLS]add", MistralNamed()),
        ('[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]sub[ARGS]{}', MistralNamed()),
        ('{"name": "add", "parameters": [1]}', LlamaJson()),
        ('{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}', LlamaJson()),
        ('{"name": "add", "parameters": {"a": 1}, "b": "x"}', LlamaJson()),
        ("<|python_tag|>add.call(a=1)", LlamaJson()),
        ("\n<|python_tag|>add.call(a=1)", LlamaJson()),
        ('so<|python_tag|>{"name": "sub", "parameters": {}}', LlamaJson()),
        ('{"name": "add", "parameters": {"a": 1, "a": 2}}', LlamaJson()),
        ('[TOOL_CALLS]add[ARGS]{"a": {"b": 1, "b": 2}}', MistralNamed()),
        (f"{BEGIN}{CALL_BEGIN}{DEEPSEEK_CALL}", DEEPSEEK),
        (f"{BEGIN}{CALL_BEGIN}add{CALL_END}{END}", DEEPSEEK),
        ('<tool_call>{"name": "add", "arguments": {"b": "x\ny"}}</tool_call>', HERMES),
        ('<tool_call>{"name": "add"\n"arguments": {"b": "x"}}</tool_call>', HERMES),
        ('<tool_calls>{"name": "add", "arguments": {}}\nand so on</tool_calls>', LISTED),
        ("<tool_call>I do not need it</tool_call>", GLM),
        ("<tool_call>add\nsub</tool_call>", GLM),
        ('<tool_call>{"name":"add","arguments":{}}</tool_call>', GLM),
    ],
)
def test_their_malformed_calls_are_content_and_said_so(text, syntax):
    assert read(text, syntax) == ParsedOutput(text, malformed=True)


@pytest.mark.parametrize("text", ['{"name": "sub", "parameters": {}}', '{"a": 1}', "[1]"])
def test_json_that_calls_no_tool_is_content(text):
    """A Llama that was asked for JSON answers with JSON."""
    assert read(text, LlamaJson()) == ParsedOutput(text)


def test_the_template_says_which_syntax_its_family_writes():
    """Where it shows none that is known, Hermes, which our own template asks for."""
    sources = {
        "hermes": "{{ x }}",
        "qwen3-coder": "<tool_call>\n<function=x><parameter=y>",
        "harmony": "<|channel|>x<|message|>",
    }
    sources |= {
        "mistral": "[TOOL_CALLS]",
        "mistral-named": "[TOOL_CALLS]f[ARGS]{}",
        "deepseek-v3": DEEPSEEK.begin + "```json",
    }
    sources |= {"llama3": '<|start_header_id|>{"name": "f", "parameters": {}}'}

    assert {name: call_syntax_of(source).name for name, source in sources.items()} == {name: name for name in sources}


BITS: list[list[int]] = [
    *[[TOKENIZER.marker_id(marker)] for marker in MARKERS],
    *[ids(text) for text in ('{"name": "add"', ', "arguments": {"a": 1}}', "<function=add>", "</function>", "\n")],
    *[ids(text) for text in ("<parameter=a>", "1", "</parameter>", "analysis", "commentary to=functions.add", "final")],
]
OUTPUTS = st.lists(st.sampled_from(BITS) | st.lists(st.integers(0, 280), max_size=4), max_size=16).map(
    lambda parts: [token_id for part in parts for token_id in part]
)


@pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda syntax: syntax.name)
@given(output=OUTPUTS, context=st.sampled_from(["", "<think>\n"]), tools=st.sampled_from([(), (ADD,)]))
@example(output=ids("<think>" * 3), context="", tools=(ADD,))
def test_any_output_is_read(syntax, output, context, tools):
    """Never an exception; a malformed output is served whole; every call is JSON that can be sent."""
    parsed = read(output, syntax, context=context, tools=tools)

    assert not (parsed.malformed and parsed.tool_calls)
    assert tools or not parsed.tool_calls
    for call in parsed.tool_calls:
        assert isinstance(json.loads(call.arguments.encode(), parse_constant=pytest.fail), dict)
    (parsed.content + parsed.reasoning).encode()

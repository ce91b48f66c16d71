"""What an agent gets to read of an output, whatever the model wrote."""

import json
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from harness.tokens.chat_tokenizer import SampledOutput
from harness.tokens.output_reader import OutputReader
from harness.tokens.parsing import ParsedOutput, ToolCall
from harness.tokens.syntaxes.marked_calls import HERMES
from tests.builders import EOS, tool, toy_tokenizer

READER = OutputReader(toy_tokenizer(), HERMES)


def parse_output(text: str) -> ParsedOutput:
    """A Hermes output whose markers are written out."""
    return READER.read(SampledOutput(ids(text)), [tool()])


def call(name: str = "add", arguments: str = '{"a": 1}') -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_calls_are_taken_out_of_the_content():
    """Several calls keep their order; what surrounds them is the content."""
    parsed = parse_output(f"Let me see.\n{call('add')}\n{call('sub', '{}')}\n")

    assert parsed == ParsedOutput("Let me see.", (ToolCall("add", '{"a": 1}'), ToolCall("sub", "{}")))


def test_equal_calls_are_all_there():
    """A model that calls the same function twice means it twice."""
    assert parse_output(call() + call()).tool_calls == (ToolCall("add", '{"a": 1}'),) * 2


def test_arguments_may_be_called_parameters():
    """As in the schema that the model was shown."""
    text = '<tool_call>{"type": "function", "name": "add", "parameters": {"a": 1}}</tool_call>'

    assert parse_output(text).tool_calls == (ToolCall("add", '{"a": 1}'),)


def test_missing_arguments_are_an_empty_object():
    assert parse_output('<tool_call>{"name": "now"}</tool_call>').tool_calls == (ToolCall("now", "{}"),)


MALFORMED = {
    "cut off": '<tool_call>\n{"name": "add", "argum',
    "no JSON": "<tool_call>add(1, 2)</tool_call>",
    "empty": "<tool_call></tool_call>",
    "close without open": f"{call()} </tool_call>",
    "close first": f"</tool_call>{call()}",
    "open without close": f"{call()}<tool_call>",
    "nested": f"<tool_call>{call()}</tool_call>",
    "no name": '<tool_call>{"arguments": {}}</tool_call>',
    "empty name": call(""),
    "name is a number": '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
    "list": '<tool_call>["add", {}]</tool_call>',
    "null": "<tool_call>null</tool_call>",
    "arguments is a list": call(arguments="[1]"),
    "arguments is null": call(arguments="null"),
    "arguments is a string": call(arguments='"{}"'),
    "NaN": call(arguments='{"a": NaN}'),
    "Infinity": call(arguments='{"a": -Infinity}'),
    "a number beyond float": call(arguments='{"a": 1e999}'),
    "a number of 5000 digits": call(arguments=f'{{"a": {"9" * 5_000}}}'),
    "half a surrogate pair": call(arguments='{"a": "\\ud800"}'),
    "half a surrogate pair as name": call("\\udfff"),
    "trailing comma": call(arguments='{"a": 1,}'),
    "arguments under another name": '<tool_call>{"name": "add", "args": {"a": 1}}</tool_call>',
    "flat arguments": '<tool_call>{"name": "add", "a": 1}</tool_call>',
    "more than a call": '<tool_call>{"name": "add", "arguments": {"a": 1}, "b": 2}</tool_call>',
    "arguments twice": '<tool_call>{"name": "add", "arguments": {"a": 1}, "parameters": {}}</tool_call>',
    "two objects": '<tool_call>{"name": "a"}{"name": "b"}</tool_call>',
    "good and bad": f"{call()}<tool_call>oops</tool_call>",
}


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_call_is_content_and_said_so(text):
    """Nothing is repaired, nothing is left out, and no part of it is executed."""
    assert parse_output(text) == ParsedOutput(text, malformed=True)


@pytest.mark.parametrize("depth", [10, 100, 300, 400, 480, 490, 495, 500, 900, 990, 1_000, 5_000, 100_000])
@pytest.mark.parametrize(("left", "right"), [("[", "]"), ('{"a":', "}")])
def test_deep_nesting_is_a_call_or_content_and_never_an_exception(depth, left, right):
    """Whatever depth the interpreter gives up at, parsing returns."""
    text = call(arguments='{"a": ' + left * depth + "1" + right * depth + "}")

    parsed = parse_output(text)

    assert parsed.malformed == (not parsed.tool_calls)
    assert parsed.malformed is False or parsed.content == text


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        '{"name": "f"',
        ', "arguments": ',
        '{"a": ',
        "}",
        "{",
        "[",
        "]",
        "\n",
        '"',
        "\\",
        "\\ud800",
    ]
)


@given(st.text() | st.lists(FRAGMENTS | st.text(max_size=4), max_size=20).map("".join))
@example("<tool_call>" * 3 + "</tool_call>" * 3)
def test_any_text_parses(text):
    """Never an exception; what is served can be encoded; content and calls never hide anything of a malformed text."""
    parsed = parse_output(text)

    assert not parsed.malformed or (parsed.content == text and not parsed.tool_calls)
    assert parsed.tool_calls or parsed.content == text
    for each in parsed.tool_calls:
        each.name.encode()
        assert isinstance(json.loads(each.arguments.encode(), parse_constant=pytest.fail), dict)


@given(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text("abü<>/"),
        max_size=4,
    ),
)
def test_a_well_formed_call_says_what_was_written(name, arguments):
    """Names and arguments come through any JSON encoding unchanged."""
    text = f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"

    [parsed] = parse_output(text).tool_calls

    assert (parsed.name, json.loads(parsed.arguments)) == (name, arguments)


@pytest.mark.parametrize("unit", ["<tool_call>", "</tool_call>", call(), "<tool_call>x</tool_call>", "<tool_"])
def test_a_degenerate_output_is_read_in_one_pass(unit):
    """A model that repeats a marker for its whole budget must not stop the server: a quadratic search takes minutes."""
    output = SampledOutput(ids(unit * (500_000 // len(unit))))
    began = time.thread_time()

    READER.read(output, [tool()])

    assert time.thread_time() - began < 10


def ids(text: str) -> list[int]:
    return toy_tokenizer().encode_plain(text)


@pytest.mark.parametrize(
    ("output", "stop", "text"),
    [
        ([*ids("hi"), EOS], None, "hi"),
        (ids("hi"), None, "hi"),
        ([], None, ""),
        ([EOS], None, ""),
        ([*ids("hi"), EOS, EOS], None, "hi<|im_end|>"),
        (ids("one STOP"), "STOP", "one "),
        (ids("one STOP two STOP"), "STOP", "one "),
        (ids("STOP"), "STOP", ""),
        ([*ids("no match"), EOS], "STOP", "no match"),
    ],
)
def test_the_id_and_the_string_that_ended_an_output_are_not_content(output, stop, text):
    """They stay in the ids; the agent reads what comes before them."""
    assert READER.read(SampledOutput(output, stop=stop), []).content == text

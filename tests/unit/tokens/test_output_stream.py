"""An output that is read while it is sampled says what the whole one says, however its ids arrive."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from harness.tokens.chat_tokenizer import SampledOutput
from harness.tokens.incremental import StopStrings
from harness.tokens.output_reader import OutputReader
from harness.tokens.parsing import CallSyntax, Delta, ParsedOutput
from harness.tokens.syntaxes.json_calls import LlamaJson
from harness.tokens.syntaxes.marked_calls import HERMES
from tests.builders import EOS, toy_tokenizer
from tests.unit.tokens.test_reading import ADD, BITS, CALL, FINAL, HARMONY_CALL, OUTPUTS, SYNTAXES, TOKENIZER, ids

CUTS = st.lists(st.integers(1, 7), min_size=1, max_size=8)
SPELLED = OutputReader(toy_tokenizer(), HERMES)
"""Its vocabulary has no marker: they are found in the text."""


def in_parts(output: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    """`output` in parts of these sizes, over and over."""
    parts, begin = [], 0
    while begin < len(output):
        size = cuts[len(parts) % len(cuts)]
        parts.append(output[begin : begin + size])
        begin += size
    return parts


def read_in_parts(
    reader: OutputReader,
    output: Sequence[int],
    cuts: Sequence[int],
    *,
    context: Sequence[int] = (),
    tools: Sequence[dict[str, object]] = (ADD,),
    stops: Sequence[str] = (),
    stop: str | None = None,
) -> tuple[list[Delta], ParsedOutput]:
    """The deltas, and what the output was in the end."""
    stream = reader.open(SampledOutput((), context), list(tools), stops)
    deltas = [stream.push(part) for part in in_parts(output, cuts)]
    return deltas, stream.end(stop)


def must_agree(deltas: Sequence[Delta], whole: ParsedOutput) -> None:
    """Nothing was given out that the whole output does not say in that place."""
    assert whole.content.startswith("".join(delta.content for delta in deltas))
    assert whole.reasoning.startswith("".join(delta.reasoning for delta in deltas))


@pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda syntax: syntax.name)
@given(output=OUTPUTS, cuts=CUTS, context=st.sampled_from(["", "<think>\n"]), tools=st.sampled_from([(), (ADD,)]))
@example(output=ids(f"<think>\n\nhm\n{CALL}"), cuts=[1], context="", tools=(ADD,))
@example(output=ids(f"\n <think>hm {CALL} \n</think>\n\n\nyes \n{CALL}\n"), cuts=[1], context="", tools=(ADD,))
@example(output=ids(f"{FINAL}<|start|>assistant{FINAL}{HARMONY_CALL}"), cuts=[1], context="", tools=(ADD,))
def test_every_split_says_the_same(syntax: CallSyntax, output, cuts, context, tools):
    """And what was given out on the way is how it begins."""
    reader = OutputReader(TOKENIZER, syntax)
    whole = reader.read(SampledOutput(output, ids(context)), list(tools))

    deltas, parsed = read_in_parts(reader, output, cuts, context=ids(context), tools=tools)

    assert parsed == whole
    must_agree(deltas, whole)


@given(
    parts=st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "<tool_", "call>", '{"name": "add"}', " ", "é<"])),
    cuts=CUTS,
)
def test_markers_that_are_written_out_are_found_in_every_split(parts, cuts):
    output = toy_tokenizer().encode_plain("".join(parts))
    whole = SPELLED.read(SampledOutput(output), [ADD])

    deltas, parsed = read_in_parts(SPELLED, output, cuts)

    assert parsed == whole
    must_agree(deltas, whole)


@given(output=st.lists(st.sampled_from([*BITS[-6:], ids("ab"), ids("b c"), ids("é")])), cuts=CUTS, data=st.data())
def test_a_stop_string_takes_nothing_back(output, cuts, data):
    """Whichever of them stops the output, what was given out stands before it."""
    stops = data.draw(st.lists(st.sampled_from(["b c", "ab\n", "1</parameter>", "é", "bb"]), min_size=1, max_size=3))
    search = StopStrings(TOKENIZER.decode, stops)
    sampled, stop = [], None
    for token_id in (token_id for part in output for token_id in part):
        sampled.append(token_id)
        stop = search.push(token_id)
        if stop is not None:
            break
    reader = OutputReader(TOKENIZER, HERMES)
    whole = reader.read(SampledOutput(sampled, stop=stop), [ADD])

    deltas, parsed = read_in_parts(reader, sampled, cuts, stops=stops, stop=stop)

    assert parsed == whole
    must_agree(deltas, whole)


@given(output=st.lists(st.integers(0, 258)), cuts=CUTS)
def test_any_bytes_say_the_same_in_every_split(output, cuts):
    """Text or not: characters that are cut, ends of turns in the middle."""
    reader = OutputReader(toy_tokenizer(), LlamaJson())
    whole = reader.read(SampledOutput(output), [])

    deltas, parsed = read_in_parts(reader, output, cuts, tools=())

    assert parsed == whole == ParsedOutput(toy_tokenizer().decode(output[:-1] if output[-1:] == [EOS] else output))
    must_agree(deltas, whole)


@pytest.mark.parametrize(
    ("text", "given_out"),
    [
        ("Let me see.\n\n", "Let me see."),
        ("Let me see.\n\n<tool_call>\n{", "Let me see."),
        ("<think>\nhm", ""),
        ("<think>\nhm\n</think>\n\nyes", "yes"),
        (f"{CALL}\nmore", ""),
    ],
)
def test_what_may_still_go_waits_and_nothing_else(text, given_out):
    """A reader sees text as soon as it is sure."""
    deltas, _ = read_in_parts(OutputReader(TOKENIZER, HERMES), ids(text), [1])

    assert "".join(delta.content for delta in deltas) == given_out


def test_a_llama_that_begins_an_object_may_be_calling():
    """And one that begins with a word is not."""
    reader = OutputReader(TOKENIZER, LlamaJson())

    assert read_in_parts(reader, ids(' {"a": 1}'), [1])[0] == [Delta()] * len(ids(' {"a": 1}'))
    assert "".join(delta.content for delta in read_in_parts(reader, ids('so {"a"'), [1])[0]) == 'so {"a"'

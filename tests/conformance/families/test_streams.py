"""Outputs of every family, read while they are sampled: whatever the split, they say what the whole one says."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.tokens.chat_tokenizer import SampledOutput
from harness.tokens.output_reader import OutputReader, call_syntax_of
from tests.builders import tool
from tests.thoroughness import examples
from tests.unit.tokens.test_output_stream import CUTS, must_agree, read_in_parts

TEXTS = st.sampled_from(
    [
        "Let me see.\n",
        " ",
        '{"name": "add", ',
        '"arguments": {}}',
        "é日👩‍👩‍👧",
        "<think>",
        "</think>",
        "<function=add>",
        "\n\n",
    ]
)


def test_every_split_says_the_same(family):
    """Of text, of the family's markers, and of ids that no text has."""
    tokenizer = family.template.tokenizer
    syntax = call_syntax_of(family.template.template.text)
    reader = OutputReader(tokenizer, syntax)
    parts = st.one_of(
        st.sampled_from(syntax.markers).map(tokenizer.encode),
        TEXTS.map(tokenizer.encode),
        st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=5),
        st.lists(st.sampled_from(sorted(tokenizer.byte_ids) or [0]), max_size=4),
    )
    outputs = st.lists(parts, max_size=12).map(lambda each: [token_id for part in each for token_id in part])

    @settings(max_examples=examples(10), deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(output=outputs, cuts=CUTS, has_tools=st.booleans())
    def holds(output: list[int], cuts: list[int], has_tools: bool) -> None:
        tools = [tool()] if has_tools else []
        whole = reader.read(SampledOutput(output), tools)

        deltas, parsed = read_in_parts(reader, output, cuts, tools=tools)

        assert parsed == whole
        must_agree(deltas, whole)

    holds()

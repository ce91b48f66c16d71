"""Templates of this project: no agent's conversation branches, and plain ones are what the maker's template says."""

import json

import pytest

from harness.errors import TokenizerError
from harness.lab.models.tokenizer_files import TEMPLATES, find_template
from harness.tokens.chat_tokenizer import DelimiterSource, SampledOutput, SampledTurn
from harness.tokens.conversations import TOOLS
from harness.tokens.parsing import ToolCall
from tests.conformance.families.family import OURS, load

EACH = pytest.mark.parametrize("family", OURS, indirect=True)
BESIDE_THE_MAKERS = pytest.mark.parametrize("family", ["deepseek_v3-ours", "mistral_nemo-ours"], indirect=True)
"""Their makers' templates are in the packages, too."""
ASKED = {"role": "user", "content": "question"}
RULES = {"role": "system", "content": "rules"}
SAID = {"role": "assistant", "content": "answer"}


def calling(*countries: str) -> dict:
    calls = [
        {
            "id": f"call0000{i}",
            "type": "function",
            "function": {"name": "find_city", "arguments": json.dumps({"country": country})},
        }
        for i, country in enumerate(countries)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(number: int, text: str) -> dict:
    return {"role": "tool", "tool_call_id": f"call0000{number}", "content": text}


LOOP = [ASKED, calling("France"), result(0, "Paris"), calling("Spain", "Italy"), result(0, "Madrid"), result(1, "Rome")]


def text(family, messages, tools=()) -> str:
    return family.chat.tokenizer.decode(family.chat.render_ids(messages, tools))


@EACH
def test_every_transition_has_a_delimiter(family):
    """System messages in the middle and tools included: there is nothing to branch for."""
    described = family.chat.describe()

    assert DelimiterSource.FULL_RENDER not in described.delimiters.values()
    assert (described.divergence, described.shows_tools, described.shows_calls) == (None, True, True)


@EACH
def test_a_tool_loop_is_one_branch(family):
    """Turn after turn, what the delimiters add up to is the whole conversation as the template renders it."""
    chat = family.chat
    ids = chat.render_ids([RULES, ASKED], TOOLS)
    conversation = [RULES, ASKED]
    steps = [
        (calling("France"), [result(0, "Paris")]),
        (calling("Spain", "Italy"), [result(0, "Madrid"), result(1, "Rome")]),
    ]
    for number, (reply, new) in enumerate([*steps, (SAID, [RULES, ASKED])]):
        before, after = (
            chat.template.render(chat.form.apply(messages), TOOLS, generation_prompt=False)
            for messages in (conversation, [*conversation, reply])
        )
        begun = text(family, conversation, TOOLS)
        written = after[len(begun) :] if after.startswith(begun) else after[len(before) :]
        output = chat.tokenizer.encode(written)
        assert output[-1] in chat.end_ids
        parsed = chat.parse(SampledOutput(output, ids[-64:]), TOOLS)
        assert [call.arguments for call in parsed.tool_calls] == [
            call["function"]["arguments"] for call in reply.get("tool_calls", ())
        ]
        extension = chat.extend_ids(SampledTurn(reply, output, ids[-64:], True, number > 0), new, TOOLS)
        assert extension is not None
        ids += [*output, *extension]
        conversation += [reply, *new]

    assert chat.tokenizer.decode(ids) == text(family, conversation, TOOLS)


@BESIDE_THE_MAKERS
@pytest.mark.parametrize(
    "messages", [[ASKED], [RULES, ASKED], [ASKED, SAID, ASKED], [ASKED, SAID, ASKED, SAID, ASKED]], ids=len
)
def test_a_plain_conversation_is_the_makers(family, messages):
    """The same ids as under the template that the model was trained with."""
    theirs = load(OURS[family.name])

    assert family.chat.render_ids(messages, ()) == theirs.chat.render_ids(messages, ())


@pytest.mark.parametrize("family", ["mistral_nemo-ours"], indirect=True)
def test_the_tool_loop_of_one_question_is_the_makers_with_mistral(family):
    """Tools, calls, ids of calls and results included."""
    theirs = load(OURS[family.name])

    assert family.chat.render_ids(LOOP, TOOLS) == theirs.chat.render_ids(LOOP, TOOLS)


@pytest.mark.parametrize("family", ["deepseek_v3-ours"], indirect=True)
def test_every_block_of_calls_and_of_results_is_opened_and_closed_with_deepseek(family):
    """Once for each answer, and once for each row of results."""
    said = text(family, LOOP)

    for marker in family.chat.tokenizer.markers:
        if "calls" in marker or "outputs" in marker:
            assert said.count(marker) == 2, marker


@EACH
def test_tools_are_told_once_at_the_beginning(family):
    """Before anything that is sampled."""
    said = text(family, [RULES, *LOOP], TOOLS)

    assert said.count("Finds a city.") == 1
    assert said.index("Finds a city.") < said.index("question")


@EACH
def test_what_the_model_is_told_to_write_is_read_as_a_call(family):
    """The call of an answer as the prompt shows it, begun as an answer is that must be a call."""
    template = family.template
    shown = template.template.render(template.form.apply([ASKED, calling("France")]), (), generation_prompt=False)
    output = family.chat.tokenizer.encode(shown.removeprefix(text(family, [ASKED])))

    assert family.chat.call_beginning_ids(None)[0] in output

    assert family.chat.parse(SampledOutput(output), TOOLS).tool_calls == (
        ToolCall("find_city", '{"country": "France"}'),
    )


def test_a_template_is_found_by_its_name_or_its_path(tmp_path):
    """Names are ours; everything else is a file."""
    own = tmp_path / "own.jinja"
    own.write_text("{{ messages }}", encoding="utf-8")

    assert all(find_template(name).is_file() for name in TEMPLATES)
    assert find_template(str(own)) == own
    with pytest.raises(TokenizerError, match="expected a file, or one of"):
        find_template("magic")

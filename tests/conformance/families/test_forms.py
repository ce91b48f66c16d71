"""Messages reach each template in a form that it shows: nothing an agent says is lost without a word."""

import pytest

from harness.errors import MalformedRequest
from harness.tokens.chat_tokenizer import SampledTurn
from harness.tokens.conversations import TOOLS

USER = {"role": "user", "content": "question"}
CALL = {"id": "call_0_0", "type": "function", "function": {"name": "find_city", "arguments": '{"country": "France"}'}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_0_0", "content": "Paris"}


def prompt(family, messages, tools=()) -> str:
    return family.chat.tokenizer.decode(family.chat.render_ids(messages, list(tools)))


def one(name: str):
    return pytest.mark.parametrize("family", [name], indirect=True)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_instructions_are_in_the_prompt(family, role):
    """Many templates drop a developer message; it goes in as system there."""
    assert "be brief" in prompt(family, [{"role": role, "content": "be brief"}, USER])


def test_a_call_is_shown_as_it_was_made_or_the_limit_is_known(family):
    """Its name, and arguments that are no text in quotes."""
    try:
        text = prompt(family, [USER, CALLING, RESULT], TOOLS)
    except MalformedRequest:
        assert not family.chat.describe().shows_calls
        return

    assert ("find_city" in text.partition("question")[2]) == family.chat.describe().shows_calls
    assert '\\"country\\"' not in text
    assert "Paris" in text


@one("mistral_nemo")
def test_call_ids_have_the_shape_that_a_template_demands(family):
    """Mistral's refuses ours; the same id always becomes the same nine characters."""
    text = prompt(family, [USER, CALLING, RESULT], TOOLS)
    [made] = [part[:9] for part in text.split('"id": "')[1:]]

    assert made.isalnum()
    assert f'"call_id": "{made}"' in text


@one("mistral_nemo")
def test_a_template_that_moves_the_system_message_branches(family):
    """It belongs to the last question there, so no earlier prompt is a prefix."""
    ended = SampledTurn({"role": "assistant", "content": "x"}, sorted(family.chat.tokenizer.eos_ids), [], True)

    assert family.chat.extend_ids(ended, [USER], []) is None
    assert family.chat.extend_ids(ended._replace(opens_with_system=False), [USER], []) is not None


@one("deepseek_v3")
@pytest.mark.parametrize("after_tools", [False, True])
def test_a_template_that_remembers_tool_results_is_told_of_them(family, after_tools):
    """DeepSeek's opens the block of results only once; the delimiter is what it says at that place."""
    earlier = [USER, CALLING, RESULT, {"role": "assistant", "content": "x"}] if after_tools else []
    whole = prompt(family, [*earlier, USER, CALLING, RESULT], TOOLS)
    turn = SampledTurn(CALLING, sorted(family.chat.tokenizer.eos_ids), [], after_tools=after_tools)

    extension = family.chat.tokenizer.decode(family.chat.extend_ids(turn, [RESULT], TOOLS))

    assert whole.endswith(extension)
    assert ("outputs\N{LOWER ONE EIGHTH BLOCK}begin" in extension) == (not after_tools)


def test_arguments_with_half_a_surrogate_pair_are_no_error_of_the_server(family):
    """As an escape it is valid JSON, and no text: the template gets what was written."""
    call = {**CALL, "function": {"name": "find_city", "arguments": r'{"\ud83d": "\ud83d"}'}}
    try:
        text = prompt(family, [USER, {**CALLING, "tool_calls": [call]}, RESULT], TOOLS)
    except MalformedRequest:
        return

    assert "Paris" in text
    assert "ud83d" in text or not family.chat.describe().shows_calls

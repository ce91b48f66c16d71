"""The checks of `harness verify tokens` find what they are there to find."""

from collections.abc import Sequence
from itertools import islice

import pytest
from tokenizers import AddedToken

from harness.tokens.chat_tokenizer import SampledOutput, SampledTurn
from harness.tokens.conversations import TEXTS, exchanges
from harness.tokens.parsing import ParsedOutput, ToolCall
from harness.tokens.templates.chat_template import ChatTemplateTokenizer
from harness.tokens.templates.jinja_template import JinjaTemplate
from harness.tokens.tokenizer import Tokenizer
from harness.tokens.verify import FamilyUnderTest, Property, PropertyResult, verify
from harness.types import Json, Message
from tests.builders import EOS, toy_template, toy_tokenizer, user

CASES = [*islice(exchanges(), 0, None, 11)]


class Spoiled(ChatTemplateTokenizer):
    """The toy family, with one thing wrong."""

    def __init__(self, wrong: Property) -> None:
        super().__init__(toy_tokenizer(), toy_template().template)
        self.wrong = wrong

    def render_ids(self, messages: Sequence[Message], tools: Sequence[Json]) -> list[int]:
        if self.wrong is Property.GUARDED:
            return self.tokenizer.encode(self.template.render(self.form.apply(messages), tools))
        ids = super().render_ids(messages, () if self.wrong is Property.TOOLS else tools)
        return [i for i in ids if i != self.tokenizer.encode("e")[0]] if self.wrong is Property.PROMPT else ids

    def extend_ids(self, previous: SampledTurn, messages: Sequence[Message], tools: Sequence[Json]) -> list[int]:
        ended = previous._replace(output_ids=[EOS]) if self.wrong is Property.CLOSED else previous
        ids = super().extend_ids(ended, messages, tools)
        assert ids is not None
        if self.wrong is Property.DELIMITER:
            del ids[len(ids) // 2]
        return ids

    def parse(self, output: SampledOutput, tools: Sequence[Json]) -> ParsedOutput:
        parsed = super().parse(output, tools)
        if self.wrong is Property.READ:
            return ParsedOutput(parsed.content, (ToolCall("add", "{}"),), malformed=True)
        return ParsedOutput(parsed.content, parsed.tool_calls[:1]) if self.wrong is Property.CALLS else parsed


def verdicts(chat: ChatTemplateTokenizer) -> list[PropertyResult]:
    return verify(FamilyUnderTest(chat, toy_template()), CASES)


def test_a_good_family_has_every_property():
    assert [(v.holds, v.refused, v.branched, v.cases) for v in verdicts(toy_template())] == [
        (True, 0, 0, len(CASES))
    ] * len(Property)


@pytest.mark.parametrize("wrong", Property)
def test_a_property_that_does_not_hold_is_found(wrong):
    """With the conversation that shows it, and what was expected."""
    [found] = verify(FamilyUnderTest(Spoiled(wrong), toy_template()), CASES, [wrong])

    assert not found.holds
    assert found.mismatch.conversation
    assert found.mismatch.expected != found.mismatch.seen


COUNTING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'user' %}{{ loop.index }} {% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_whose_delimiters_depend_on_the_history_always_branches():
    """It numbers the turns: a dummy conversation cannot know which number comes next."""
    chat = ChatTemplateTokenizer(toy_tokenizer(), JinjaTemplate(COUNTING))

    assert chat.extend_ids(SampledTurn(user("x"), [EOS], []), [user("b")], []) is None
    assert chat.describe().divergence.conversation == "the delimiter, early and late"
    held = {verdict.checked_property for verdict in verify(FamilyUnderTest(chat, chat), CASES) if verdict.holds}
    assert held == {*Property} - {Property.TOOLS, Property.CALLS}


REFUSING = (
    "{% if tools %}{{ raise_exception('no tools') }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_check_that_could_not_look_does_not_pass():
    """A template that refuses most conversations; nothing contradicts the others."""
    chat = ChatTemplateTokenizer(toy_tokenizer(), JinjaTemplate(REFUSING))
    results = verify(FamilyUnderTest(chat, chat), CASES)

    assert results[0].refused > 0.1 * results[0].cases
    assert results[0].mismatch is None
    assert {result.holds for result in results} == {False}


def test_forging_is_tried_with_every_added_token():
    """Of hundreds, one that is not guarded is found, special or not."""
    raw = type(toy_tokenizer()._raw).from_str(toy_tokenizer()._raw.to_str())
    raw.add_tokens([AddedToken(f"<|extra_{i}|>", special=i % 2 == 0, normalized=False) for i in range(500)])
    chat = ChatTemplateTokenizer(Tokenizer(raw, eos_ids=frozenset([EOS])), toy_template().template)

    class Leaky(ChatTemplateTokenizer):
        def render_ids(self, messages, tools):
            ids = super().render_ids(messages, tools)
            return [*ids, self.tokenizer.marker_id(leak)] if any(leak in m["content"] for m in messages) else ids

    leak = "<|extra_357|>"
    leaky = Leaky(Tokenizer(raw, eos_ids=frozenset([EOS])), toy_template().template)

    assert verify(FamilyUnderTest(chat, chat), CASES, [Property.GUARDED])[0].holds
    assert not verify(FamilyUnderTest(leaky, chat), CASES, [Property.GUARDED])[0].holds


def test_the_conversations_are_what_they_are_said_to_be():
    """Every text at every role; all orders of roles up to two earlier rounds."""
    made = [*exchanges()]
    said = {(message["role"], message["content"]) for case in made for message in (*case.prior, *case.new)}

    assert len({str(case) for case in made}) == len(made)
    for role in ("system", "developer", "user", "tool"):
        assert {text for spoken_by, text in said if spoken_by == role} == set(TEXTS)

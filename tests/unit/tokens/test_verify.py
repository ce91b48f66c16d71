"""The checks of `harness verify tokens` find what they are there to find."""

from collections.abc import Sequence
from itertools import islice

import pytest

from harness.tokens.chat_tokenizer import SampledOutput, SampledTurn
from harness.tokens.conversations import TEXTS, exchanges
from harness.tokens.parsing import ParsedOutput, ToolCall
from harness.tokens.templates.chat_template import ChatTemplateTokenizer
from harness.tokens.templates.jinja_template import JinjaTemplate
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
        ids = super().render_ids(messages, tools)
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
    """Ours does, and refuses nothing."""
    assert [(v.holds, v.refused, v.branched, v.cases) for v in verdicts(toy_template())] == [
        (True, 0, 0, len(CASES))
    ] * len(Property)


@pytest.mark.parametrize("wrong", Property)
def test_a_property_that_does_not_hold_is_found(wrong):
    """With the conversation that shows it, and what was expected."""
    found = {verdict.checked_property: verdict for verdict in verdicts(Spoiled(wrong))}

    assert not found[wrong].holds
    assert found[wrong].mismatch.conversation
    assert found[wrong].mismatch.expected != found[wrong].mismatch.seen


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
    assert {verdict.holds for verdict in verify(FamilyUnderTest(chat, chat), CASES)} == {True}


def test_the_conversations_are_what_they_are_said_to_be():
    """Every text at every role; all orders of roles up to two earlier rounds."""
    made = [*exchanges()]
    said = {(message["role"], message["content"]) for case in made for message in (*case.prior, *case.new)}

    assert len({str(case) for case in made}) == len(made)
    for role in ("system", "developer", "user", "tool"):
        assert {text for spoken_by, text in said if spoken_by == role} == set(TEXTS)

"""Check whether a template is append-only: a longer conversation begins with the text of a shorter one.

The check runs when a model folder is opened. Sessions keep sampled ids whatever it finds.
"""

from collections.abc import Sequence
from os.path import commonprefix

from harness.tokens.chat_tokenizer import TemplateDivergence
from harness.tokens.delimiter import PrefixTrick, dummy_answer, dummy_messages
from harness.tokens.templates.jinja_template import JinjaTemplate
from harness.tokens.templates.message_form import MessageForm
from harness.tokens.tokenizer import Tokenizer
from harness.types import Message


def find_divergence(template: JinjaTemplate, form: MessageForm, tokenizer: Tokenizer) -> TemplateDivergence | None:
    """Return the first probe in which `template` rewrites its earlier output."""
    for messages in _PROBES:
        formed = form.apply(messages)
        longer = template.try_render(formed, generation_prompt=False)
        if longer is None:  # a probe that the template refuses proves nothing
            continue
        for answer in (i for i, message in enumerate(formed) if message["role"] == "assistant"):
            prompt = template.try_render(formed[:answer])
            answered = template.try_render(formed[: answer + 1], generation_prompt=False)
            for shorter in (prompt, answered):
                position = None if shorter is None else _first_difference(tokenizer, shorter, longer)
                if position is not None:
                    return TemplateDivergence(" ".join(str(message["role"]) for message in formed), *position)
    return None


def find_dependence(trick: PrefixTrick, tokenizer: Tokenizer) -> TemplateDivergence | None:
    """Return where a delimiter depends on the length of the conversation, which then must be rendered whole."""
    texts = trick.find_dependence()
    found = None if texts is None else _first_difference(tokenizer, *texts)
    return None if found is None else TemplateDivergence("the delimiter, early and late", *found)


def _first_difference(tokenizer: Tokenizer, shorter: str, longer: str) -> tuple[int, str, str] | None:
    before, after = tokenizer.encode(shorter), tokenizer.encode(longer)
    same = len(commonprefix([before, after]))  # noqa: RUF071  # of ids
    if same == len(before):
        return None
    texts = [tokenizer.token_text(ids[same]) if same < len(ids) else "(end)" for ids in (before, after)]
    return same, texts[0], texts[1]


_PROBES: tuple[Sequence[Message], ...] = (
    dummy_messages(["user", "assistant", "user", "assistant", "user"], ["one", "two", "three", "four", "five"]),
    dummy_messages(
        ["system", "user", "assistant", "user"], ["rules", "one", "<think>\nsecret\n</think>\n\ntwo", "three"]
    ),
    [
        *dummy_messages(["user"], ["one"]),
        dummy_answer(1),
        *dummy_messages(["tool", "assistant", "user"], ["two", "three", "four"]),
    ],
)

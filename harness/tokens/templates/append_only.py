"""Check whether a template is append-only: a longer conversation begins with the text of a shorter one.

The check runs when a model folder is opened. Sessions keep sampled ids whatever it finds.
"""

from harness.tokens.chat_tokenizer import TemplateDivergence
from harness.tokens.delimiter import PrefixTrick
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
    same = next(
        (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after))
    )
    if same == len(before):
        return None
    texts = [tokenizer.token_text(ids[same]) if same < len(ids) else "(end)" for ids in (before, after)]
    return same, texts[0], texts[1]


_PROBES: tuple[tuple[Message, ...], ...] = (
    (
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "four"},
        {"role": "user", "content": "five"},
    ),
    (
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<think>\nsecret\n</think>\n\ntwo"},
        {"role": "user", "content": "three"},
    ),
    (
        {"role": "user", "content": "one"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call_0_0", "type": "function", "function": {"name": "find", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "call_0_0", "content": "two"},
        {"role": "assistant", "content": "three"},
        {"role": "user", "content": "four"},
    ),
)

"""Templates are rendered as `transformers.apply_chat_template` renders them: every one that can be had, to the letter.

With `HARNESS_TRL_SRC` those of a checkout of TRL are looked at, too. Two differences are meant. Our day is always the
first of 2025 (I10), so the day of transformers is held there. A content of None stays None, so none is in here:
DeepSeek V3 shows calls only beside it, and transformers drops the field since version 5.
"""

import datetime as dt
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import jinja2
import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from harness.errors import MalformedRequest
from harness.lab.models.tokenizer_files import TEMPLATES, find_template
from harness.tokens.conversations import exchanges
from harness.tokens.templates.jinja_template import JinjaTemplate
from harness.tokens.templates.message_form import MessageForm
from harness.types import Json, Message
from tests.conformance.families.packages import SHA512
from tests.toy_model import write_toy_model

CONVERSATIONS = 40
TRL = os.environ.get("HARNESS_TRL_SRC")
FILES = [*map(find_template, TEMPLATES), *sorted(Path(TRL).rglob("chat_templates/*.jinja") if TRL else ())]
WRITTEN = {
    "parameters of tojson": "{% for t in tools or [] %}{{ t | tojson(true, 2) }}{{ t | tojson(ensure_ascii=False,"
    " separators=(',', ':'), sort_keys=True) }}{% endfor %}{% for m in messages %}{{ m | tojson(true) }}{% endfor %}",
    "generation": "{% for m in messages %}{% set x = 1 %}{% generation %}{% set x = 2 %}{{ m.content }}{{ loop.index }}"
    "{% endgeneration %}{{ x }}{% endfor %}",
    "loop controls": "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}{{ m.content }}"
    "{% if loop.index > 4 %}{% break %}{% endif %}{% endfor %}",
    "names of reasoning": "{% for m in messages %}{{ m.thinking }}|{{ m.reasoning_content }}|{{ m.reasoning }};"
    "{{ m.content is defined }}{% endfor %}",
    "the day": "{{ strftime_now('%d %b %Y %H:%M') }}{{ bos_token is defined }}{{ messages | length }}",
    "what is defined": "{{ tools is defined }}{{ documents is defined }}{{ enable_thinking is defined }}"
    "{{ messages | map(attribute='tool_calls') | list | length }}{{ dict(a=1) | tojson(indent=1) }}",
    "refusals": "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}",
    "white space": "\n  {% if tools %}\n  with\n  {%- endif %}\n{% for m in messages %}\n  {{ m.role }}\n{% endfor %}",
}
"""Templates that need one convention each."""


def conversations() -> Iterator[tuple[list[Message], list[Json]]]:
    """Of all roles, with and without tools, some with reasoning under each of its names, some with empty fields."""
    made = [*exchanges()]
    for number, case in enumerate(islice(made, 0, None, len(made) // CONVERSATIONS)):
        reply = {**case.reply, **({}, {"reasoning_content": "hm"}, {"reasoning": "hm"}, {"name": None})[number % 4]}
        yield [*case.prior, reply, *case.new], list(case.tools)


def differences(template: JinjaTemplate, tokenizer: PreTrainedTokenizerFast, source: str | None = None) -> list[str]:
    """The conversations that ours and transformers render differently, in both forms of messages."""
    found, refusals = [], (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)
    cases = [*conversations()][:CONVERSATIONS]
    assert len(cases) == CONVERSATIONS
    forms = (replace(MessageForm.of(template), no_content_beside_calls=False), MessageForm())
    for messages, tools in cases:
        for form in forms:
            formed = form.apply(messages)
            try:
                expected = tokenizer.apply_chat_template(
                    formed, tools=tools or None, chat_template=source, add_generation_prompt=True, tokenize=False
                )
            except refusals:
                expected = None
            try:
                seen = template.render(formed, tools)
            except MalformedRequest:
                seen = None
            if expected != seen:
                found.append(f"{[each['role'] for each in messages]}: expected {expected!r}, got {seen!r}")
    return found


@pytest.fixture(name="the_day", autouse=True)
def _the_day(monkeypatch: pytest.MonkeyPatch) -> None:
    class FirstOfJanuary(dt.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2025, 1, 1, tzinfo=tz)

    monkeypatch.setattr(chat_template_utils, "datetime", FirstOfJanuary)


@cache
def toy() -> PreTrainedTokenizerFast:
    with TemporaryDirectory() as directory:
        return PreTrainedTokenizerFast.from_pretrained(write_toy_model(Path(directory)))


@pytest.mark.parametrize("name", WRITTEN)
def test_each_convention_is_that_of_transformers(name):
    """Filters, tags, globals, the fields of messages, white space."""
    variables = toy().special_tokens_map

    assert differences(JinjaTemplate(WRITTEN[name], variables), toy(), WRITTEN[name]) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_template_file_is_rendered_as_by_transformers(path):
    """Ours, and those of TRL's training."""
    source = path.read_text(encoding="utf-8")

    assert differences(JinjaTemplate(source, toy().special_tokens_map), toy(), source) == []


@pytest.mark.parametrize("family", SHA512, indirect=True)
def test_a_makers_template_is_rendered_as_by_transformers(family):
    """From its folder, special tokens and templates by name included."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(family.folder)

    assert differences(JinjaTemplate.load(family.folder), tokenizer) == []


@pytest.mark.parametrize("place", ["folder", "config"])
def test_with_tools_the_template_for_tools_is_meant(tmp_path, place):
    """Wherever a model keeps several."""
    from transformers.utils import CHAT_TEMPLATE_DIR

    folder = write_toy_model(tmp_path)
    named = {"default": "plain {{ messages[0].content }}", "tool_use": "tools {{ tools[0].function.name }}"}
    written = PreTrainedTokenizerFast.from_pretrained(folder)
    (folder / "chat_template.jinja").unlink()
    written.chat_template = named
    written.save_pretrained(folder, save_jinja_files=place == "folder")
    template = JinjaTemplate.load(folder)

    assert (folder / CHAT_TEMPLATE_DIR).is_dir() == (place == "folder")
    assert differences(template, PreTrainedTokenizerFast.from_pretrained(folder)) == []
    assert template.render([{"role": "user", "content": "x"}]) == "plain x"

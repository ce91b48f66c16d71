"""What the official template says, by hands that are not ours: `transformers` renders and `tokenizers` encodes.

Ours is only the form of the messages: templates disagree about arguments, call ids and roles, and each gets them as it
wants them (`MessageForm`).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import jinja2
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from harness.types import Json, Message
from tests.conformance.families.family import Family

_NEEDLE = "Zq7Zq7"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True)
class Official:
    """Tokenizer and template of a family as its maker published them."""

    tokenizer: Tokenizer
    sources: tuple[str, str]
    """The template for conversations without tools, and with tools."""
    variables: dict[str, str]
    ends: tuple[str, ...]
    """The markers that end an answer, first the one that ends plain words; none where that is text."""
    family: Family

    def prompt(self, messages: Sequence[Message], tools: Sequence[Json], *, asks: bool = True) -> str:
        """The whole prompt for the next answer, or without it (`asks`) the conversation."""
        said = [{**message, "content": message["content"] or ""} for message in messages]  # null beside calls
        rendered, _ = render_jinja_template(
            [self.family.template.form.apply(said)],
            tools=list(tools) or None,
            chat_template=self.sources[bool(tools)],
            add_generation_prompt=asks,
            date_string="01 Jan 2025",  # the day of ours
            current_date="2025-01-01",
            **self.variables,
        )
        return str(rendered[0])

    def added(self, known: Sequence[Message], reply: Message, new: Sequence[Message], tools: Sequence[Json]) -> str:
        """What stands behind the answer `reply` to `known` when `new` follows, the marker that ends it included.

        The answer says something else here, so that its end can be found. It ends as plain words do, also where calls
        end in another way: DeepSeek's template forgets the marker behind one call, harmony has another one for calls.
        """
        calls = reply.get("tool_calls") or []
        needled: Json = {"role": "assistant", "content": _NEEDLE}
        if calls and self.family.template.form.shows_calls:
            last = {**calls[-1], "function": {**calls[-1]["function"], "arguments": json.dumps({"x": _NEEDLE})}}
            needled = {"role": "assistant", "content": "", "tool_calls": [*calls[:-1], last]}
        elif calls:
            needled["tool_calls"] = calls
        closing = self.prompt([*known, needled], tools, asks=False).rpartition(_NEEDLE)[2]
        behind = self.prompt([*known, needled, *new], tools).rpartition(_NEEDLE)[2]
        if not self.ends:
            return behind
        found = [(position, end) for end in self.ends if (position := closing.find(end)) >= 0]
        position, end = min(found, default=(0, ""))
        return self.ends[0] + (behind[position + len(end) :] if found else behind.removeprefix(closing))

    def encode(self, text: str) -> list[int]:
        """Ids of `text`."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, markers written out."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))


@cache
def official(family: Family) -> Official:
    """What the maker of `family` published, read again."""
    config = json.loads((family.folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    special = {name: config.get(name) for name in _SPECIAL}
    texts = {name: token["content"] if isinstance(token, dict) else token for name, token in special.items() if token}
    tokenizer = Tokenizer.from_file(str(family.folder / "tokenizer.json"))
    ends = tuple(family.chat.tokenizer.token_text(token_id) for token_id in sorted(family.template.end_ids))
    return Official(tokenizer, family.template.template.sources, texts, ends, family)


REFUSALS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)
"""How a template refuses messages."""

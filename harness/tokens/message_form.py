"""The form of messages that one template understands, found by trying.

OpenAI's messages carry tool arguments as text, call ids of any shape and a `developer` role. Templates disagree: some
drop what they do not expect without a word (a developer message, the calls beside an empty content), some put quoted
text where an object belongs, some refuse an id that has not nine characters. `MessageForm.of` renders a probe in each
form and keeps the first that the template shows as it is.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Self

from harness.tokens.jinja_template import JinjaTemplate
from harness.types import Json, Message

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_SHORT_ID_LENGTH = 9
_NEEDLE = "zebra"
_TEXT_ARGUMENTS = '{"zebra":  "<1>"}'
"""Two spaces: only a template that takes text as it is shows them."""


@dataclass(frozen=True, slots=True)
class MessageForm:
    """How messages are handed to a template."""

    arguments_as_text: bool = True
    """Tool arguments go in as the JSON text that was sampled, else as the object it stands for."""
    no_content_beside_calls: bool = False
    """An empty content beside tool calls goes in as None."""
    short_call_ids: bool = False
    """Call ids become nine letters and digits."""
    developer_as_system: bool = False
    """The template has no developer role."""
    shows_calls: bool = True
    """Tool calls of earlier turns are rendered in one of these forms."""
    shows_tools: bool = True
    """The template tells the model which tools there are."""

    @classmethod
    def of(cls, template: JinjaTemplate) -> Self:
        """The form that `template` understands."""
        developer = not _shows(template, [{"role": "developer", "content": _NEEDLE}, _USER], (), _NEEDLE)
        tools = _shows(template, [_USER], [_TOOL], _NEEDLE)
        for as_text, no_content, short in itertools.product((True, False), (False, True), (False, True)):
            form = cls(as_text, no_content, short, developer, shows_tools=tools)
            needle = _TEXT_ARGUMENTS if as_text else '"zebra": "<1>"'
            if _shows(template, form.apply([_USER, _CALLS, _RESULT]), [_TOOL], needle):
                return form
        return cls(developer_as_system=developer, shows_calls=False, shows_tools=tools)

    def apply(self, messages: Sequence[Message]) -> list[Message]:
        """`messages` in this form."""
        return [self._form(message) for message in messages]

    def _form(self, message: Message) -> Message:
        formed: Json = dict(message)
        if self.developer_as_system and message["role"] == "developer":
            formed["role"] = "system"
        if message.get("tool_calls"):
            formed["tool_calls"] = [dict(call) for call in message["tool_calls"]]
            for call in formed["tool_calls"]:
                if self.short_call_ids:
                    call["id"] = _short_id(str(call.get("id", "")))
                if not self.arguments_as_text:
                    arguments = _argument_object(call["function"]["arguments"])
                    call["function"] = {**call["function"], "arguments": arguments}
            if self.no_content_beside_calls and not message.get("content"):
                formed["content"] = None
        if self.short_call_ids and "tool_call_id" in message:
            formed["tool_call_id"] = _short_id(str(message["tool_call_id"]))
        return formed


def _shows(template: JinjaTemplate, messages: Sequence[Message], tools: Sequence[Json], needle: str) -> bool:
    return needle in (template.try_render(messages, tools) or "")


def _argument_object(arguments: Any) -> Any:
    """The object in JSON arguments; whatever is not one stays as it is."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _short_id(call_id: str) -> str:
    """`call_id` when it is nine letters and digits, else nine that depend on it alone."""
    if len(call_id) == _SHORT_ID_LENGTH and call_id.isascii() and call_id.isalnum():
        return call_id
    number = int.from_bytes(blake2b(call_id.encode(), digest_size=8).digest())
    return "".join(_DIGITS[number // 36**i % 36] for i in range(_SHORT_ID_LENGTH))


_USER: Message = {"role": "user", "content": "question"}
_TOOL: Json = {
    "type": "function",
    "function": {"name": "find", "description": _NEEDLE, "parameters": {"type": "object", "properties": {}}},
}
_CALLS: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call_0_0", "type": "function", "function": {"name": "find", "arguments": _TEXT_ARGUMENTS}},
    ],
}
_RESULT: Message = {"role": "tool", "tool_call_id": "call_0_0", "content": "result"}

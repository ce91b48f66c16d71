"""Form of messages that one template understands, found by trying.

OpenAI's messages have tool arguments as text, call ids of any shape and a `developer` role. Some templates silently
drop what they do not expect, quote text where an object belongs, or refuse ids that do not have nine characters.
`MessageForm.of` keeps the first form that the template shows unchanged.
"""

import itertools
import json
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import groupby
from typing import Any, Self

from harness.errors import MalformedRequest
from harness.tokens.parsing import ToolCall
from harness.tokens.templates.jinja_template import JinjaTemplate
from harness.types import Json, Message

_INSTRUCTING = frozenset({"system", "developer"})
_OF_THE_RECORD = frozenset({"is_error", "redacted_thinking"})
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_SHORT_ID_LENGTH = 9
_NEEDLE = "zebra"
_BETWEEN = "\n\n"
_TEXT_ARGUMENTS = '{"zebra":  "<1>"}'  # two spaces, which only a template that takes text shows
_JSON_KEY = re.compile(r'"zebra"\s*:')
_ARGUMENTS = ((True, _TEXT_ARGUMENTS), (False, '"zebra": "<1>"'), (False, "<1>"))
"""Pairs: True for arguments as text, and the output that shows them."""


@dataclass(frozen=True, slots=True)
class MessageForm:
    arguments_as_text: bool = True
    """True for the sampled JSON text, False for the object."""
    no_content_beside_calls: bool = False
    """True if empty content next to tool calls becomes None."""
    short_call_ids: bool = False
    """True if call ids become nine letters and digits."""
    developer_as_system: bool = False
    late_roles: frozenset[str] = _INSTRUCTING
    """Roles whose messages stay in place after others."""
    shows_calls: bool = True
    shows_tools: bool = True

    @classmethod
    def of(cls, template: JinjaTemplate) -> Self:
        developer = not _shows(template, [{"role": "developer", "content": _NEEDLE}, _USER], (), _NEEDLE)
        tools = _shows(template, [_USER], [_TOOL], _NEEDLE)
        late = frozenset(role for role in _INSTRUCTING if _shows_late(template, "system" if developer else role))
        for (as_text, needle), no_content, short in itertools.product(_ARGUMENTS, (False, True), (False, True)):
            form = cls(as_text, no_content, short, developer, late, shows_tools=tools)
            if _shows(template, form.apply([_USER, _CALLS, _RESULT]), [_TOOL], needle) and not (
                as_text and _respells(template, replace(form, arguments_as_text=False))
            ):
                return form
        return cls(developer_as_system=developer, late_roles=late, shows_calls=False, shows_tools=tools)

    def apply(self, messages: Sequence[Message], *, goes_on: bool = False) -> list[Message]:
        """Return `messages` in this form. With `goes_on` they follow others."""
        return [self._form(message) for message in self.place(messages, goes_on=goes_on)]

    def place(self, messages: Sequence[Message], *, goes_on: bool = False) -> Sequence[Message]:
        """Move messages that the template does not show in place into a neighbor."""
        # Some templates refuse, move or drop system messages after others. Their text goes into a neighbor between the
        # same two answers, so that it renders alike in a whole conversation and in a continuation.
        hidden = _INSTRUCTING - self.late_roles
        if not hidden:
            return messages
        leading = 0 if goes_on else next((i for i, each in enumerate(messages) if each["role"] not in _INSTRUCTING), 0)
        if leading <= 1 and not any(message["role"] in hidden for message in messages[leading:]):
            return messages
        placed: list[Message] = []
        if leading:  # joined, because the template has a place for one at the head
            texts = [message["content"] for message in messages[:leading]]
            placed.append({**messages[0], "content": _BETWEEN.join(texts)})
        for is_answer, stretch in groupby(messages[leading:], key=lambda message: message["role"] == "assistant"):
            between = list(stretch)
            placed += between if is_answer else _fold(between, hidden)
        return placed

    def _form(self, message: Message) -> Message:
        formed: Json = {field: value for field, value in message.items() if field not in _OF_THE_RECORD}
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


def refusal_of(messages: Sequence[Message], said: str) -> MalformedRequest:
    """Return the client's error, naming the first call whose arguments are no JSON object."""
    for i, message in enumerate(messages):
        for j, call in enumerate(message.get("tool_calls") or ()):
            if not isinstance(_argument_object(call["function"]["arguments"]), dict):
                field = f"messages[{i}].tool_calls[{j}].function.arguments"
                return MalformedRequest(f"{field}: expected a JSON object ({said})", param=field)
    return MalformedRequest(said, param="messages")


def _fold(messages: Sequence[Message], hidden: Set[str]) -> list[Message]:
    # Into the next user's message, or else the one before, or else the next.
    folded: list[Message] = []
    waiting: list[str] = []  # texts for the message that comes next
    for number, message in enumerate(messages):
        if message["role"] not in hidden:
            texts = [*waiting, message.get("content") or ""]
            folded.append({**message, "content": _BETWEEN.join(texts)} if waiting else message)
            waiting = []
            continue
        following = next((each["role"] for each in messages[number + 1 :] if each["role"] not in hidden), None)
        if folded and following != "user":
            folded[-1] = {**folded[-1], "content": _BETWEEN.join([folded[-1].get("content") or "", message["content"]])}
        else:
            waiting.append(message["content"])
    return [*folded, {"role": "user", "content": _BETWEEN.join(waiting)}] if waiting else folded


def _shows_late(template: JinjaTemplate, role: str) -> bool:
    late: Message = {"role": role, "content": _NEEDLE}
    start, more = [_SYSTEM, _USER, _ANSWER], {**_USER, "content": "more"}
    without = template.try_render([*start, more]) or ""
    between = template.try_render([*start, late, more]) or ""
    at_end = template.try_render([_SYSTEM, _USER, late]) or ""
    before = without.partition("answer")[0] + "answer"
    is_between = between.startswith(before) and _NEEDLE in between[len(before) :].partition("more")[0]
    return is_between and _NEEDLE in at_end.partition("question")[2]


def _shows(template: JinjaTemplate, messages: Sequence[Message], tools: Sequence[Json], needle: str) -> bool:
    return needle in (template.try_render(messages, tools) or "")


def _respells(template: JinjaTemplate, form: MessageForm) -> bool:
    """Return True if the template writes an object of arguments otherwise than as JSON, which a text would be."""
    written = template.try_render(form.apply([_USER, _CALLS, _RESULT]), [_TOOL]) or ""
    return "<1>" in written and _JSON_KEY.search(written) is None


def _argument_object(arguments: Any) -> Any:
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
        if isinstance(arguments, str) and "\\u" in arguments:
            json.dumps(value, ensure_ascii=False).encode()  # raises on a lone surrogate, which no prompt can have
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _short_id(call_id: str) -> str:
    if len(call_id) == _SHORT_ID_LENGTH and call_id.isascii() and call_id.isalnum():
        return call_id
    number = int.from_bytes(blake2b(call_id.encode(), digest_size=8).digest())
    return "".join(_DIGITS[number // 36**i % 36] for i in range(_SHORT_ID_LENGTH))


_SYSTEM: Message = {"role": "system", "content": "rules"}
_USER: Message = {"role": "user", "content": "question"}
_ANSWER: Message = {"role": "assistant", "content": "answer"}
_FIND: Json = {"name": "find", "description": _NEEDLE, "parameters": {"type": "object", "properties": {}}}
_TOOL: Json = {"type": "function", "function": _FIND}
_CALLS: Message = {**_ANSWER, "content": "", "tool_calls": [ToolCall("find", _TEXT_ARGUMENTS).to_json("call_0_0")]}
_RESULT: Message = {"role": "tool", "tool_call_id": "call_0_0", "content": "result"}

"""What stands between a sampled answer and the next one, found with the prefix trick.

A small dummy conversation is rendered with the new messages behind a dummy answer. Where the rendering up to that
answer is what the model had before it, the rest is the delimiter: the close marker, the new messages, the generation
prompt. Nothing that was sampled is part of it, and its cost does not grow with the session.
"""

from collections.abc import Sequence
from typing import NamedTuple

from harness.errors import MalformedRequest, TokenizerError
from harness.tokens.jinja_template import JinjaTemplate
from harness.types import Json, Message

_SYSTEM: Message = {"role": "system", "content": "rules"}
_QUESTION: Message = {"role": "user", "content": "question"}
_SENTINEL = "\N{BLACK HEART SUIT}answer\N{BLACK HEART SUIT}"
_ANSWER: Message = {"role": "assistant", "content": _SENTINEL}


class Transition(NamedTuple):
    """From an answer to the next one: what a delimiter depends on beside the texts of the new messages."""

    opens_with_system: bool
    """The conversation begins with a system message."""
    after_tools: bool
    """Some tool has answered before; there are templates that remember it."""
    calls: int
    """Tool calls in the answer that was sampled."""
    roles: tuple[str, ...]
    """Roles of the new messages."""
    has_tools: bool

    def __str__(self) -> str:
        before = "system, " * self.opens_with_system + "tools, " * self.after_tools
        before += "calls" if self.calls else "answer"
        return f"{before} -> {' '.join(self.roles)}{' (tools)' * self.has_tools}"


def dummy_messages(roles: Sequence[str], texts: Sequence[str], call_ids: str = "call_0_") -> list[Message]:
    """Messages of those roles that say `texts`."""
    return [
        {"role": role, "content": text} | ({"tool_call_id": f"{call_ids}{i}"} if role == "tool" else {})
        for i, (role, text) in enumerate(zip(roles, texts, strict=True))
    ]


def dummy_answer(calls: int) -> Message:
    """An answer that makes so many tool calls."""
    function = {"name": "find", "arguments": "{}"}
    made = [{"id": f"call_0_{i}", "type": "function", "function": function} for i in range(calls)]
    return {"role": "assistant", "content": "", "tool_calls": made} if calls else {"role": "assistant", "content": "x"}


def dummy_start(transition: Transition) -> list[Message]:
    """A conversation before the answer, of the kind that `transition` says."""
    earlier = [_QUESTION, dummy_answer(1), *dummy_messages(["tool"], ["result"]), dummy_answer(0)]
    return [*([_SYSTEM] * transition.opens_with_system), *(earlier if transition.after_tools else ()), _QUESTION]


def dummy_tools(name: str = "find") -> list[Json]:
    """One tool."""
    parameters = {"type": "object", "properties": {name: {"type": "string"}}}
    return [{"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}]


class PrefixTrick:
    """Delimiters of a template, by rendering dummies."""

    def __init__(self, template: JinjaTemplate) -> None:
        """Raises `TokenizerError` when the template cannot render a question and its answer."""
        self._template = template
        self.close_text = self._find_close_text()
        """What the template writes after an answer, such as `<|im_end|>` and a newline."""

    def find(
        self, start: Sequence[Message], reply: Message, messages: Sequence[Message], tools: Sequence[Json]
    ) -> str | None:
        """The text from the end of an answer to the next one, after `messages`; of `reply` only the calls matter.

        `start` is the dummy conversation before the answer (`dummy_start`).

        None when the template renders what was before the answer in another way, or refuses the dummy: only the whole
        conversation can then be rendered.
        """
        if reply.get("tool_calls"):
            text = self._after_closed(start, reply, messages, tools)
            return text if text is not None else self._after_sentinel(start, messages, tools)
        text = self._after_sentinel(start, messages, tools)
        return text if text is not None else self._after_closed(start, _ANSWER, messages, tools)

    def find_dependence(self) -> tuple[str, str] | None:
        """The same delimiter early and late in a conversation, when the template makes a difference between them."""
        answered = [_QUESTION, dummy_answer(0)]
        late = [*answered, *answered, *answered, _QUESTION]
        early_text, late_text = (self.find(start, dummy_answer(0), [_QUESTION], ()) for start in ([_QUESTION], late))
        if early_text is None or late_text is None or early_text == late_text:
            return None
        return early_text, late_text

    def _after_sentinel(
        self, start: Sequence[Message], messages: Sequence[Message], tools: Sequence[Json]
    ) -> str | None:
        """What follows the answer's content, when everything before it is the prompt that it was sampled from."""
        prompt = self._template.try_render(start, tools)
        whole = self._template.try_render([*start, _ANSWER, *messages], tools)
        if prompt is None or whole is None or not whole.startswith(prompt + _SENTINEL):
            return None
        return whole[len(prompt + _SENTINEL) :]

    def _after_closed(
        self, start: Sequence[Message], reply: Message, messages: Sequence[Message], tools: Sequence[Json]
    ) -> str | None:
        """The close marker and what follows it, when everything up to it is rendered as it is without `messages`.

        Only the generation prompt may differ from what the answer was sampled after: some begin the reasoning.
        """
        asked = self._template.try_render(start, tools, generation_prompt=False)
        before = self._template.try_render([*start, reply], tools, generation_prompt=False)
        after = self._template.try_render([*start, reply, *messages], tools)
        if asked is None or before is None or after is None:
            return None
        if not (after.startswith(before) and before.startswith(asked)):
            return None
        return self.close_text + after[len(before) :]

    def _find_close_text(self) -> str:
        try:
            text = self._template.render([_QUESTION, _ANSWER], generation_prompt=False)
        except MalformedRequest as error:
            raise TokenizerError(f"the chat template fails on a question and its answer: {error}") from error
        if _SENTINEL not in text:
            raise TokenizerError("the chat template does not render the content of assistant messages")
        return text[text.rindex(_SENTINEL) + len(_SENTINEL) :]

"""Delimiter: the text between a sampled answer and the next one, found with the prefix trick.

A chat template renders only whole conversations, and the sampled answer must not be rendered again (I1). So a small
dummy conversation is rendered, with the new messages after a dummy answer:

    prompt  = render(start)                                     ends with "<|im_start|>assistant" and a newline
    whole   = render(start + dummy answer + new messages)       prompt + sentinel + delimiter

The delimiter is the part of `whole` after the sentinel. This is right only if the template is a concatenation, so every
rendering is checked: `whole` must begin with the exact prompt text. A template that rewrites earlier text (drops
reasoning, moves a hint) fails, and the session branches. The cost does not grow with the session.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

from harness.errors import MalformedRequest, TokenizerError
from harness.tokens.chat_tokenizer import SampledTurn
from harness.tokens.templates.jinja_template import JinjaTemplate
from harness.types import Json, Message

_SYSTEM: Message = {"role": "system", "content": "rules"}
_QUESTION: Message = {"role": "user", "content": "question"}
_SENTINEL = "\N{BLACK HEART SUIT}answer\N{BLACK HEART SUIT}"
_ANSWER: Message = {"role": "assistant", "content": _SENTINEL}


class Transition(NamedTuple):
    """Everything that a delimiter depends on except texts."""

    opens_with_system: bool
    after_tools: bool
    calls: int
    roles: tuple[str, ...]
    has_tools: bool

    @classmethod
    def behind(cls, previous: SampledTurn, messages: Sequence[Message], tools: Sequence[Json]) -> Self:
        return cls(
            previous.opens_with_system,
            previous.after_tools,
            len(previous.reply.get("tool_calls") or ()),
            tuple(message["role"] for message in messages),
            bool(tools),
        )

    def __str__(self) -> str:
        before = "system, " * self.opens_with_system + "tools, " * self.after_tools
        before += "calls" if self.calls else "answer"
        return f"{before} -> {' '.join(self.roles)}{' (tools)' * self.has_tools}"


def dummy_messages(roles: Sequence[str], texts: Sequence[str], call_ids: str = "call_0_") -> list[Message]:
    return [
        {"role": role, "content": text} | ({"tool_call_id": f"{call_ids}{i}"} if role == "tool" else {})
        for i, (role, text) in enumerate(zip(roles, texts, strict=True))
    ]


def dummy_answer(calls: int, name: str = "find") -> Message:
    function = {"name": name, "arguments": "{}"}
    made = [{"id": f"call_0_{i}", "type": "function", "function": function} for i in range(calls)]
    return {"role": "assistant", "content": "", "tool_calls": made} if calls else {"role": "assistant", "content": "x"}


def dummy_start(transition: Transition) -> list[Message]:
    # All that templates are known to look at: a system message, earlier tool results, the calls in the answer.
    # `PrefixTrick.find_dependence` detects those that also tell an early turn from a late one.
    earlier = [_QUESTION, dummy_answer(1), *dummy_messages(["tool"], ["result"]), dummy_answer(0)]
    return [*([_SYSTEM] * transition.opens_with_system), *(earlier if transition.after_tools else ()), _QUESTION]


def dummy_tools(name: str = "find") -> list[Json]:
    parameters = {"type": "object", "properties": {name: {"type": "string"}}}
    return [{"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}]


class PrefixTrick:
    def __init__(self, template: JinjaTemplate) -> None:
        """Raise `TokenizerError` if the template cannot render a question and its answer."""
        self._template = template
        try:
            text = template.render([_QUESTION, _ANSWER], generation_prompt=False)
        except MalformedRequest as error:
            raise TokenizerError(f"the chat template fails on a question and its answer: {error}") from error
        if _SENTINEL not in text:
            raise TokenizerError("the chat template does not render the content of assistant messages")
        self.close_text = text[text.rindex(_SENTINEL) + len(_SENTINEL) :]
        """Text after an answer, such as `<|im_end|>` and a newline."""

    def find(
        self, start: Sequence[Message], reply: Message, messages: Sequence[Message], tools: Sequence[Json]
    ) -> str | None:
        """Return the text between the answer to `start` and the next one, after `messages`.

        Of `reply` only the calls matter. None if the template changes the text before the answer, or refuses the dummy.
        """
        # The sentinel cannot mark the end of an answer with tool calls, which are rendered after the content. There the
        # conversation is compared with the same one without `messages`. The way that fits the answer comes first.
        if reply.get("tool_calls"):
            text = self._after_closed(start, reply, messages, tools)
            return text if text is not None else self._after_sentinel(start, messages, tools)
        text = self._after_sentinel(start, messages, tools)
        return text if text is not None else self._after_closed(start, _ANSWER, messages, tools)

    def find_dependence(self) -> tuple[str, str] | None:
        """Return a delimiter early and late in a conversation, if they differ."""
        answered = [_QUESTION, dummy_answer(0)]
        late = [*answered, *answered, *answered, _QUESTION]
        early_text, late_text = (self.find(start, dummy_answer(0), [_QUESTION], ()) for start in ([_QUESTION], late))
        if early_text is None or late_text is None or early_text == late_text:
            return None
        return early_text, late_text

    def _after_sentinel(
        self, start: Sequence[Message], messages: Sequence[Message], tools: Sequence[Json]
    ) -> str | None:
        prompt = self._template.try_render(start, tools)
        whole = self._template.try_render([*start, _ANSWER, *messages], tools)
        if prompt is None or whole is None or not whole.startswith(prompt + _SENTINEL):
            return None
        return whole[len(prompt + _SENTINEL) :]

    def _after_closed(
        self, start: Sequence[Message], reply: Message, messages: Sequence[Message], tools: Sequence[Json]
    ) -> str | None:
        # Only the generation prompt may differ from the sampled one, because some begin the reasoning: leave it out.
        asked = self._template.try_render(start, tools, generation_prompt=False)
        before = self._template.try_render([*start, reply], tools, generation_prompt=False)
        after = self._template.try_render([*start, reply, *messages], tools)
        if asked is None or before is None or after is None:
            return None
        if not (after.startswith(before) and before.startswith(asked)):
            return None
        return self.close_text + after[len(before) :]

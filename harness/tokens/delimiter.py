"""The delimiter: the text between a sampled answer and the next one, found with the prefix trick.

A session keeps the ids of its prompt and of the sampled answer, and needs the ids that come after them. A chat template
only renders whole conversations, and rendering the sampled answer again is forbidden (I1). So a small dummy
conversation is rendered instead, with the new messages behind a dummy answer:

    prompt  = render(start)                                     ends with "<|im_start|>assistant" and a newline
    whole   = render(start + dummy answer + new messages)       prompt + sentinel + delimiter

The delimiter is what `whole` has after the sentinel: the close marker, the new messages, the generation prompt. This is
right only where the template is a concatenation, and that is tested on every rendering: `whole` must begin with the
very text that the model had before the answer. A template that rewrites what came before (it drops earlier reasoning,
moves a hint) fails the test, and the session branches. The dummy has the shape of the real conversation as far as
templates are known to look: a system message, earlier tool results, the number of calls in the answer.
`find_dependence` looks for templates that also tell an early turn from a late one. Nothing that was sampled is part of
a delimiter, and its cost does not grow with the session.

The sentinel cannot mark the end of an answer with tool calls, whose rendering goes on behind the content. There the
whole conversation is compared with the same one without the new messages (`_after_closed`); both ways are tried, the
one that fits the answer first.
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
    """From an answer to the next one: everything a delimiter depends on beside the texts of the new messages."""

    opens_with_system: bool
    """The conversation begins with a system message."""
    after_tools: bool
    """Some tool has answered before; there are templates that remember it."""
    calls: int
    """Tool calls in the answer that was sampled."""
    roles: tuple[str, ...]
    """Roles of the new messages."""
    has_tools: bool

    @classmethod
    def behind(cls, previous: SampledTurn, messages: Sequence[Message], tools: Sequence[Json]) -> Self:
        """The one from `previous` to the turn after `messages`."""
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
    """Messages of those roles that say `texts`."""
    return [
        {"role": role, "content": text} | ({"tool_call_id": f"{call_ids}{i}"} if role == "tool" else {})
        for i, (role, text) in enumerate(zip(roles, texts, strict=True))
    ]


def dummy_answer(calls: int, name: str = "find") -> Message:
    """An answer that makes so many tool calls, all of the function `name`."""
    function = {"name": name, "arguments": "{}"}
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
        try:
            text = template.render([_QUESTION, _ANSWER], generation_prompt=False)
        except MalformedRequest as error:
            raise TokenizerError(f"the chat template fails on a question and its answer: {error}") from error
        if _SENTINEL not in text:
            raise TokenizerError("the chat template does not render the content of assistant messages")
        self.close_text = text[text.rindex(_SENTINEL) + len(_SENTINEL) :]
        """The text that the template writes after an answer, such as `<|im_end|>` and a newline."""

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
        """The text after the answer's content, when everything before it is the prompt that it was sampled from."""
        prompt = self._template.try_render(start, tools)
        whole = self._template.try_render([*start, _ANSWER, *messages], tools)
        if prompt is None or whole is None or not whole.startswith(prompt + _SENTINEL):
            return None
        return whole[len(prompt + _SENTINEL) :]

    def _after_closed(
        self, start: Sequence[Message], reply: Message, messages: Sequence[Message], tools: Sequence[Json]
    ) -> str | None:
        """The close marker and the text after it, when all before it is rendered as it is without `messages`.

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

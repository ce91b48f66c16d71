"""Messages to prompt ids through a chat template, one turn at a time.

Invariant (I1): what was sampled is never tokenized again. `render_ids` encodes a conversation that starts a branch;
`extend_ids` returns only what the template puts between a sampled output and the next one: the rest of the close
marker, the new messages, the generation prompt. It is found with the prefix trick: a dummy conversation is rendered
with and without the new messages, and the difference is the delimiter.

Messages cannot forge turn markers: a special token that occurs inside a message's text is encoded as ordinary
characters. Does not parse outputs and does not know sessions.
"""

import datetime as dt
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

import jinja2
import jinja2.ext
import jinja2.sandbox

from harness.errors import MalformedRequest, TokenizerError
from harness.tokens.tokenizer import Tokenizer, read_json
from harness.types import Json, Message

_DUMMY_USER: Message = {"role": "user", "content": "question"}
_SENTINEL = "\N{BLACK HEART SUIT}answer\N{BLACK HEART SUIT}"
_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))

_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a template can raise over messages that it was not written for: it is a program, of somebody else."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a template rewrites what it rendered before."""

    conversation: str
    """The roles that show it, as in `user assistant user`."""
    position: int
    """Index of the first differing token."""
    before: str
    after: str


class ChatTemplate:
    """A chat template bound to its tokenizer."""

    def __init__(self, tokenizer: Tokenizer, source: str, variables: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.source = source
        self._variables = dict(variables or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise TokenizerError(f"the chat template does not compile: {error}") from error
        self._close_text = self._find_close_text()
        self._specials = re.compile("|".join(re.escape(text) for text in tokenizer.special_tokens) or r"(?!)")

    @classmethod
    def load(cls, directory: Path, tokenizer: Tokenizer, *, template_file: Path | None = None) -> Self:
        """The template of a HuggingFace folder (`chat_template.jinja` or the one in `tokenizer_config.json`).

        Raises `TokenizerError` when there is none or it does not compile.
        """
        config = read_json(directory / "tokenizer_config.json")
        special = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
        source = _template_source(directory, config, template_file)
        return cls(tokenizer, source, {name: text for name, text in special.items() if text is not None})

    def render_ids(self, messages: Sequence[Message], tools: Sequence[Json]) -> list[int]:
        """Ids of the whole prompt for the assistant's next turn.

        Raises `MalformedRequest` when the template refuses the messages.
        """
        guard = _Guard(self._specials, messages, tools)
        return self._encode(self._render(guard.messages, guard.tools, generation_prompt=True), guard)

    def extend_ids(
        self, reply: Message, last_id: int | None, messages: Sequence[Message], tools: Sequence[Json]
    ) -> list[int] | None:
        """Ids between the sampled output of `reply` and the assistant's next turn, after `messages`.

        `last_id` is the last sampled id, None for an empty output. An output that did not end itself (cut by length,
        by an abort, by a stop string) is closed first with the template's own close marker. None when the template is
        not append-only here; the caller then renders a new branch. Raises `MalformedRequest` when the template refuses
        the messages.
        """
        guard = _Guard(self._specials, messages, tools)
        dummy = [_DUMMY_USER, _dummy_reply(reply)]
        before = self._render(dummy, guard.tools, generation_prompt=False)
        after = self._render([*dummy, *guard.messages], guard.tools, generation_prompt=True)
        if not after.startswith(before):
            return None
        return self._encode(self._unsampled_close(last_id) + after[len(before) :], guard)

    def find_divergence(self) -> Divergence | None:
        """The first conversation of a small set in which this template is not append-only, None if there is none."""
        for messages in _PROBES:
            for length in range(1, len(messages)):
                found = self._compare(messages[:length], messages)
                if found is not None:
                    return found
        return None

    def _compare(self, shorter: Sequence[Message], longer: Sequence[Message]) -> Divergence | None:
        if shorter[-1]["role"] != "assistant":
            return None
        before = self.tokenizer.encode(self._render(shorter, (), generation_prompt=False))
        after = self.tokenizer.encode(self._render(longer, (), generation_prompt=False))
        same = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
        if same == len(before) <= len(after):
            return None
        roles = " ".join(str(message["role"]) for message in longer)
        texts = [self.tokenizer.token_text(ids[same]) if same < len(ids) else "(end)" for ids in (before, after)]
        return Divergence(roles, same, *texts)

    def _find_close_text(self) -> str:
        """What the template writes after an assistant message, such as `<|im_end|>` and a newline."""
        try:
            text = self._render([_DUMMY_USER, {"role": "assistant", "content": _SENTINEL}], (), generation_prompt=False)
        except MalformedRequest as error:
            raise TokenizerError(f"the chat template fails on a question and its answer: {error}") from error
        if _SENTINEL not in text:
            raise TokenizerError("the chat template does not render the content of assistant messages")
        return text[text.rindex(_SENTINEL) + len(_SENTINEL) :]

    def _unsampled_close(self, last_id: int | None) -> str:
        if last_id is None or last_id not in self.tokenizer.eos_ids:
            return self._close_text
        return self._close_text.removeprefix(self.tokenizer.token_text(last_id))

    def _render(self, messages: Sequence[Message], tools: Sequence[Json], *, generation_prompt: bool) -> str:
        try:
            return self._template.render(
                messages=list(messages),
                tools=list(tools) or None,
                add_generation_prompt=generation_prompt,
                **self._variables,
            )
        except _TEMPLATE_FAULTS as error:
            raise MalformedRequest(f"the chat template refuses these messages: {error}", param="messages") from error

    def _encode(self, text: str, guard: "_Guard") -> list[int]:
        if not guard.found:
            return self.tokenizer.encode(text)
        ids: list[int] = []
        position = 0
        for special in self._specials.finditer(text):
            ids += self.tokenizer.encode_plain(guard.restore(text[position : special.start()]))
            ids += self.tokenizer.encode(special.group())
            position = special.end()
        return ids + self.tokenizer.encode_plain(guard.restore(text[position:]))


class _Guard:
    """Swaps special tokens written out inside messages for placeholders; what is left are the template's own."""

    def __init__(self, specials: re.Pattern[str], messages: Sequence[Message], tools: Sequence[Json]) -> None:
        self.messages, self.tools = messages, tools
        texts = list(_strings([messages, tools]))
        self.found = sorted({match for text in texts for match in specials.findall(text)}, key=len, reverse=True)
        if not self.found:
            return
        used = set("".join(texts))
        free = (chr(code) for codes in _PRIVATE_USE for code in codes if chr(code) not in used)
        self._placeholders = dict(zip(self.found, free, strict=False))
        if len(self._placeholders) < len(self.found):
            raise MalformedRequest("messages: they use every private character there is", param="messages")
        self.messages, self.tools = self._hide(messages), self._hide(tools)

    def restore(self, text: str) -> str:
        """`text` with the placeholders turned back into what the message said."""
        for special, placeholder in self._placeholders.items():
            text = text.replace(placeholder, special)
        return text

    def _hide(self, value: Any) -> Any:
        if isinstance(value, str):
            for special, placeholder in self._placeholders.items():
                value = value.replace(special, placeholder)
            return value
        if isinstance(value, Mapping):
            return {self._hide(key): self._hide(item) for key, item in value.items()}
        return [self._hide(item) for item in value] if isinstance(value, Sequence) else value


def _strings(value: Any) -> "list[str]":
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for pair in value.items() for item in pair for text in _strings(item)]
    return [text for item in value for text in _strings(item)] if isinstance(value, Sequence) else []


def _dummy_reply(reply: Message) -> Message:
    """An assistant message with the tool calls of `reply`, which some templates look up for the tool results."""
    calls = reply.get("tool_calls")
    return {"role": "assistant", "content": "", "tool_calls": calls} if calls else {"role": "assistant", "content": "x"}


def _template_source(directory: Path, config: Json, template_file: Path | None) -> str:
    path = template_file or directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    declared = config.get("chat_template")
    if template_file is not None or not isinstance(declared, str):
        raise TokenizerError(f"expected a chat template in {path}, found none; pass one or use an instruct model")
    return declared


def _token_text(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _environment() -> jinja2.Environment:
    """Jinja as chat templates expect it (the conventions of `transformers.utils.chat_template_utils`)."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _template_date
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(reason: str) -> NoReturn:
    raise jinja2.TemplateError(reason)


def _template_date(pattern: str) -> str:
    """A fixed day: a prompt that changes with the calendar cannot be reproduced (I10)."""
    return dt.date(2025, 1, 1).strftime(pattern)


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
)

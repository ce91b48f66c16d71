"""Chat template of a model folder: a Jinja program that turns messages into text.

It runs sandboxed, under the conventions of `transformers.utils.chat_template_utils`. Two differences from
`apply_chat_template` are deliberate: the date is fixed, and a content of None stays None, as it did until transformers
5, because templates such as DeepSeek V3's show calls only then.
"""

import datetime as dt
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NoReturn, Self

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from harness.errors import MalformedRequest, TokenizerError
from harness.tokens.tokenizer import declared_token, read_json
from harness.types import Json, Message

# A template may raise any of these over messages it was not written for, which is the client's error.
_FAULTS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OF_CONVERSATIONS = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
_REASONING = ("reasoning_content", "thinking", "reasoning")  # templates read the first two


class JinjaTemplate:
    """Compiled chat template, or two: `tool_use` serves conversations with tools."""

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None, *, tool_use: str | None = None) -> None:
        """Raise `TokenizerError` if a source does not compile."""
        self.sources = (source, source if tool_use is None else tool_use)
        """Sources for conversations without and with tools."""
        self.text = "".join(dict.fromkeys(self.sources))
        """Joined sources, which show markers and call syntax."""
        self._special = dict(variables or {})
        self.variables: Mapping[str, Any] = {}
        """Variables set by an operator, a session or a request."""
        self._compiled = [_compile(each) for each in dict.fromkeys(self.sources)]

    @classmethod
    def load(cls, directory: Path, template_file: Path | None = None) -> Self:
        """Load the template of a HuggingFace folder, or `template_file`. Raises `TokenizerError`."""
        config = read_json(directory / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:  # where older folders name special tokens
            config |= read_json(directory / "special_tokens_map.json")
        special = {name: declared_token(config, name) for name in _SPECIAL_TOKENS}
        variables = {name: text for name, text in special.items() if text is not None}
        if template_file is None:
            named = _templates_of(directory, config)
        else:
            named = {"default": template_file.read_text(encoding="utf-8")} if template_file.is_file() else {}
        source, tool_use = named.get("default"), named.get("tool_use")
        if source is None:
            where = template_file or directory / "chat_template.jinja"
            raise TokenizerError(f"expected a chat template in {where}, found none; pass one or use an instruct model")
        return cls(source, variables, tool_use=tool_use)

    @cached_property
    def variable_names(self) -> frozenset[str]:
        """Variables that may be set: the template reads them, and no conversation or tokenizer has them."""
        read = {
            name
            for source in self.sources
            for name in jinja2.meta.find_undeclared_variables(_environment().parse(source))
        }
        return frozenset(read - _environment().globals.keys() - {*_SPECIAL_TOKENS, *_OF_CONVERSATIONS})

    def with_variables(self, variables: Mapping[str, Any]) -> Self:
        for name in variables:
            if name not in self.variable_names:
                known = ", ".join(sorted(self.variable_names)) or "none"
                raise MalformedRequest(
                    f"template variable {name[:64]!r}: expected one that the chat template reads ({known})",
                    param="template_variables",
                )
        bound = copy(self)
        bound.variables = {**self.variables, **variables}
        return bound

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    def render(self, messages: Sequence[Message], tools: Sequence[Json] = (), *, generation_prompt: bool = True) -> str:
        """Return the text of a conversation. Raises `MalformedRequest` if the template refuses it."""
        template = self._compiled[-1 if tools else 0]
        told = {
            "messages": [_as_templates_know_it(message) for message in messages],
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": generation_prompt,
        }
        try:
            return template.render({**self._special, **self.variables, **told})
        except _FAULTS as error:
            raise MalformedRequest(f"the chat template refuses these messages: {error}", param="messages") from error

    def try_render(
        self, messages: Sequence[Message], tools: Sequence[Json] = (), *, generation_prompt: bool = True
    ) -> str | None:
        """Return None if the template refuses the conversation."""
        try:
            return self.render(messages, tools, generation_prompt=generation_prompt)
        except MalformedRequest:
            return None


def _templates_of(directory: Path, config: Json) -> dict[str, str]:
    files = {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    if (default := directory / "chat_template.jinja").is_file():
        files["default"] = default
    if files:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    declared = config.get("chat_template")
    named: list[Json] = declared if isinstance(declared, list) else [{"name": "default", "template": declared}]
    return {each["name"]: each["template"] for each in named if isinstance(each.get("template"), str)}


class _Generation(jinja2.ext.Extension):
    """Tag around an answer that marks it for trainers."""

    tags = {"generation"}  # noqa: RUF012  # the library's type

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        # A block of its own: variables set inside end with it.
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    @staticmethod
    def _render(caller: Callable[[], str]) -> str:
        return caller()


@cache
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    # A fixed day: a prompt that changes with the calendar cannot be reproduced (I10).
    environment.globals["strftime_now"] = dt.datetime(2025, 1, 1).strftime  # noqa: DTZ001  # no zone: as transformers
    return environment


def _compile(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateError as error:
        raise TokenizerError(f"the chat template does not compile: {error}") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _as_templates_know_it(message: Message) -> Json:
    # An empty content stays: some templates show calls only next to None, and `MessageForm` finds that out.
    said = {name: value for name, value in message.items() if value is not None or name == "content"}
    reasoning = next((said[name] for name in _REASONING if name in said), None)
    return said if reasoning is None else {"thinking": reasoning, **said, "reasoning_content": reasoning}


def _refuse(reason: str) -> NoReturn:
    raise jinja2.TemplateError(reason)

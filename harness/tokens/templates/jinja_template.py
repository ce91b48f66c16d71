"""The chat template of a model folder: a Jinja program that turns messages into text.

Runs sandboxed, under the conventions of `transformers`, and gives the same text on every day of the year. An exception
of a template over messages that it was not written for is the client's error. Knows no tokens.
"""

import datetime as dt
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

import jinja2
import jinja2.ext
import jinja2.sandbox

from harness.errors import MalformedRequest, TokenizerError
from harness.tokens.tokenizer import declared_token, read_json
from harness.types import Json, Message

_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""The exceptions of a template over messages that it was not written for: it is somebody else's program."""


class JinjaTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None) -> None:
        """Raises `TokenizerError` when `source` does not compile."""
        self.source = source
        self._variables = dict(variables or {})
        # As chat templates expect it: the conventions of `transformers.utils.chat_template_utils`.
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        environment.globals["raise_exception"] = _refuse
        # A fixed day: a prompt that changes with the calendar cannot be reproduced (I10).
        environment.globals["strftime_now"] = dt.date(2025, 1, 1).strftime
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TokenizerError(f"the chat template does not compile: {error}") from error

    @classmethod
    def load(cls, directory: Path, template_file: Path | None = None) -> Self:
        """The template of a HuggingFace folder (`chat_template.jinja` or the one in `tokenizer_config.json`).

        Raises `TokenizerError` when there is none or it does not compile.
        """
        config = read_json(directory / "tokenizer_config.json")
        special = {name: declared_token(config, name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
        variables = {name: text for name, text in special.items() if text is not None}
        path = template_file or directory / "chat_template.jinja"
        if path.is_file():
            return cls(path.read_text(encoding="utf-8"), variables)
        source = config.get("chat_template")
        if isinstance(source, list):  # several, by name: `default`, `tool_use`, `rag`
            source = next((entry.get("template") for entry in source if entry.get("name") == "default"), None)
        if template_file is not None or not isinstance(source, str):
            raise TokenizerError(f"expected a chat template in {path}, found none; pass one or use an instruct model")
        return cls(source, variables)

    @property
    def digest(self) -> str:
        """SHA-256 of the source."""
        return hashlib.sha256(self.source.encode()).hexdigest()

    def render(self, messages: Sequence[Message], tools: Sequence[Json] = (), *, generation_prompt: bool = True) -> str:
        """The text of a conversation. Raises `MalformedRequest` when the template refuses the messages."""
        try:
            return self._template.render(
                messages=list(messages),
                tools=list(tools) or None,
                add_generation_prompt=generation_prompt,
                **self._variables,
            )
        except _FAULTS as error:
            raise MalformedRequest(f"the chat template refuses these messages: {error}", param="messages") from error

    def try_render(
        self, messages: Sequence[Message], tools: Sequence[Json] = (), *, generation_prompt: bool = True
    ) -> str | None:
        """The text of a conversation, None when the template refuses it."""
        try:
            return self.render(messages, tools, generation_prompt=generation_prompt)
        except MalformedRequest:
            return None


def _refuse(reason: str) -> NoReturn:
    raise jinja2.TemplateError(reason)

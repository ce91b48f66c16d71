"""A model family under test: its folder, the chat tokenizer that serves it, and its plain template."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from harness.tokens.chat_template import ChatTemplateTokenizer
from harness.tokens.chat_tokenizer import ChatTokenizer
from harness.tokens.opening import open_chat_tokenizer


@dataclass(frozen=True)
class Family:
    """One real tokenizer with its real template."""

    name: str
    folder: Path
    chat: ChatTokenizer
    """What serves the family: a renderer or its template."""
    template: ChatTemplateTokenizer

    @classmethod
    def open(cls, name: str, folder: Path) -> Self:
        """The family in `folder`."""
        chat = open_chat_tokenizer(folder)
        template = chat if isinstance(chat, ChatTemplateTokenizer) else ChatTemplateTokenizer.load(folder)
        return cls(name, folder, chat, template)

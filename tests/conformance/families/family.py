"""A model family under test: its folder, the chat tokenizer that serves it, and its plain template."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

from harness.models import resolve_model
from harness.tokens.chat_template import ChatTemplateTokenizer
from harness.tokens.chat_tokenizer import ChatTokenizer
from harness.tokens.model_family import open_chat_tokenizer
from tests.conformance.families.packages import SHA512, fetch_tokenizer

SMOLLM2 = "smollm2"
NAMES = (SMOLLM2, *SHA512)


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


@cache
def load(name: str) -> Family:
    """The family `name`, fetched when it is not in the cache. Raises `OSError` or `subprocess.SubprocessError`."""
    folder = resolve_model("smollm2-135m-instruct") if name == SMOLLM2 else fetch_tokenizer(name)
    return Family.open(name, folder)

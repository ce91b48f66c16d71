"""A model family under test: its folder, the chat tokenizer that serves it, and its plain template."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

from harness.models import resolve_model
from harness.models.chat_templates import find_template
from harness.tokens.chat_template import ChatTemplateTokenizer
from harness.tokens.chat_tokenizer import ChatTokenizer
from harness.tokens.model_family import open_chat_tokenizer
from tests.conformance.families.packages import SHA512, fetch_tokenizer

SMOLLM2 = "smollm2"
OURS = {"deepseek_v3-ours": "deepseek_v3", "mistral_nemo-ours": "mistral_nemo"}
"""Families with a template of this project, and whose tokenizer they have; the template has that name, too."""
NAMES = (SMOLLM2, *SHA512, *OURS)


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
        """The family in `folder`, with our template where `name` is one of `OURS`."""
        ours = OURS.get(name)
        chat = open_chat_tokenizer(folder, template_file=None if ours is None else find_template(ours))
        template = chat if isinstance(chat, ChatTemplateTokenizer) else ChatTemplateTokenizer.load(folder)
        return cls(name, folder, chat, template)


@cache
def load(name: str) -> Family:
    """The family `name`, fetched when it is not in the cache. Raises `OSError` or `subprocess.SubprocessError`."""
    is_smollm2 = name == SMOLLM2
    folder = resolve_model("smollm2-135m-instruct") if is_smollm2 else fetch_tokenizer(OURS.get(name, name))
    return Family.open(name, folder)

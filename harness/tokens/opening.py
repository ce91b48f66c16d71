"""From a HuggingFace folder to the chat tokenizer of its model family."""

from pathlib import Path

from harness.tokens.chat_template import ChatTemplateTokenizer
from harness.tokens.chat_tokenizer import ChatTokenizer


def open_chat_tokenizer(directory: Path, *, template_file: Path | None = None) -> ChatTokenizer:
    """The chat tokenizer of `directory`; `template_file` replaces its template.

    Raises `TokenizerError` when tokenizer or template are missing or unusable.
    """
    return ChatTemplateTokenizer.load(directory, template_file=template_file)

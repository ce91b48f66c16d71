"""From a HuggingFace folder to the chat tokenizer of its model family.

A template that is append-only serves itself. Where it rewrites what it rendered, a renderer of the `renderers` package
that writes the same ids takes its place, if there is one: it was made for going on where such a template would not.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.errors import MalformedRequest, TokenizerError
from harness.tokens.chat_tokenizer import ChatTokenizer
from harness.tokens.templates.chat_template import ChatTemplateTokenizer

AUTO, NONE = "auto", "none"


def open_chat_tokenizer(
    directory: Path,
    *,
    template_file: Path | None = None,
    renderer: str = AUTO,
    template_variables: Mapping[str, Any] | None = None,
) -> ChatTokenizer:
    """The chat tokenizer of `directory`; `template_file` replaces its template, whose variables may be set.

    `renderer` is a name of the `renderers` package, `none` to use the template whatever it does, or `auto`. Raises
    `TokenizerError` when tokenizer, template or renderer are missing or unusable, or a variable is not read.
    """
    template = ChatTemplateTokenizer.load(directory, template_file=template_file)
    try:
        template = template.with_variables(template_variables or {})
    except MalformedRequest as error:
        raise TokenizerError(error.message) from error
    if renderer == NONE or (renderer == AUTO and template.divergence is None):
        return template
    from harness.tokens.templates.renderers import RenderersTokenizer, find_renderer  # half a second, for few families

    return RenderersTokenizer(renderer, template) if renderer != AUTO else find_renderer(template) or template

"""Choice of the chat tokenizer for a HuggingFace folder."""

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
    """Return the chat tokenizer of `directory`. `template_file` replaces its template.

    `renderer` is a name of the `renderers` package, `none`, or `auto`. Raises `TokenizerError` if a part is missing or
    unusable, or the template does not read a variable.
    """
    template = ChatTemplateTokenizer.load(directory, template_file=template_file)
    try:
        template = template.with_variables(template_variables or {})
    except MalformedRequest as error:
        raise TokenizerError(error.message) from error
    if renderer == NONE or (renderer == AUTO and template.divergence is None):
        return template
    # A renderer that writes the template's ids can continue where the template rewrites its earlier output.
    from harness.tokens.templates.renderers import RenderersTokenizer, find_renderer  # half a second, few families

    return RenderersTokenizer(renderer, template) if renderer != AUTO else find_renderer(template) or template

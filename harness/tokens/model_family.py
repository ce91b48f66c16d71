"""From a HuggingFace folder to the chat tokenizer of its model family.

A template that is append-only serves itself. Where it rewrites what it rendered, a renderer of the `renderers` package
that writes the same ids takes its place, if there is one: it was made for going on where such a template would not.
"""

from pathlib import Path

from harness.tokens.chat_tokenizer import ChatTokenizer
from harness.tokens.templates.chat_template import ChatTemplateTokenizer

AUTO, NONE = "auto", "none"


def open_chat_tokenizer(directory: Path, *, template_file: Path | None = None, renderer: str = AUTO) -> ChatTokenizer:
    """The chat tokenizer of `directory`; `template_file` replaces its template.

    `renderer` is a name of the `renderers` package, `none` to use the template whatever it does, or `auto`. Raises
    `TokenizerError` when tokenizer, template or renderer are missing or unusable.
    """
    template = ChatTemplateTokenizer.load(directory, template_file=template_file)
    if renderer == NONE or (renderer == AUTO and template.divergence is None):
        return template
    from harness.tokens.templates.renderers import RenderersTokenizer, find_renderer  # half a second, for few families

    return RenderersTokenizer(renderer, template) if renderer != AUTO else find_renderer(template) or template

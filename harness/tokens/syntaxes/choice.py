"""Which syntax a model family writes its calls in: its chat template shows them, so it says."""

from harness.tokens.parsing import CallSyntax
from harness.tokens.syntaxes.harmony import Harmony
from harness.tokens.syntaxes.hermes import Hermes
from harness.tokens.syntaxes.qwen_xml import QwenXml


def call_syntax_of(template_source: str) -> CallSyntax:
    """The syntax that a template renders calls in; Hermes where it renders none that is known."""
    if "<|channel|>" in template_source and "<|message|>" in template_source:
        return Harmony()
    if "<function=" in template_source:
        return QwenXml()
    return Hermes()

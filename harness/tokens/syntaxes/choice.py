"""Which syntax a model family writes its calls in: its chat template renders them, so it says."""

from collections.abc import Callable, Mapping

from harness.tokens.parsing import CallSyntax
from harness.tokens.syntaxes.deepseek import DeepSeek
from harness.tokens.syntaxes.harmony import Harmony
from harness.tokens.syntaxes.hermes import Hermes
from harness.tokens.syntaxes.llama_json import LlamaJson
from harness.tokens.syntaxes.mistral import Mistral
from harness.tokens.syntaxes.qwen_xml import QwenXml

_SIGNS: Mapping[tuple[str, ...], Callable[[], CallSyntax]] = {
    ("<|channel|>", "<|message|>"): Harmony,
    ("<function=", "<parameter="): QwenXml,
    ("<tool_call>",): Hermes,
    ("[TOOL_CALLS]",): Mistral,
    (DeepSeek.markers[0],): DeepSeek,
    ("<|start_header_id|>", '"parameters": '): LlamaJson,
}
"""What a template contains that renders the syntax; the first that fits."""


def call_syntax_of(template_source: str) -> CallSyntax:
    """The syntax that a template renders calls in; Hermes where it renders none that is known."""
    fitting = (syntax for signs, syntax in _SIGNS.items() if all(sign in template_source for sign in signs))
    return next(fitting, Hermes)()

"""Reads the outputs of a model family: content, reasoning, and calls in the family's syntax.

The id that ended the output and the stop string are not content. Reasoning is what stands between `<think>` and
`</think>` where those are single ids; the prompt may have begun it. A call inside reasoning that was closed is a draft.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from harness.tokens.chat_tokenizer import SampledOutput
from harness.tokens.parsing import CallSyntax, ParsedOutput, Piece, cut_before, cut_ids
from harness.tokens.syntaxes.deepseek import DeepSeek
from harness.tokens.syntaxes.harmony import Harmony
from harness.tokens.syntaxes.json_calls import Hermes, LlamaJson, Mistral
from harness.tokens.syntaxes.qwen_xml import QwenXml
from harness.tokens.tokenizer import Tokenizer
from harness.types import Json

_THINK, _THOUGHT = "<think>", "</think>"
_THINK_PIECE, _THOUGHT_PIECE = Piece(_THINK, is_marker=True), Piece(_THOUGHT, is_marker=True)

_SIGNS: Mapping[tuple[str, ...], Callable[[], CallSyntax]] = {
    ("<|channel|>", "<|message|>"): Harmony,
    ("<function=", "<parameter="): QwenXml,
    ("<tool_call>",): Hermes,
    ("[TOOL_CALLS]",): Mistral,
    (DeepSeek.markers[0],): DeepSeek,
    ("<|start_header_id|>", '"parameters": '): LlamaJson,
}
"""The texts in a template that renders the syntax; the first row that fits decides."""


def call_syntax_of(template_source: str) -> CallSyntax:
    """The syntax that a template renders calls in; Hermes where it renders none that is known."""
    fitting = (syntax for signs, syntax in _SIGNS.items() if all(sign in template_source for sign in signs))
    return next(fitting, Hermes)()


class OutputReader:
    """Reads the outputs of one model family."""

    def __init__(self, tokenizer: Tokenizer, syntax: CallSyntax) -> None:
        self.syntax = syntax
        self._tokenizer = tokenizer
        self._think_ids = (tokenizer.marker_id(_THINK), tokenizer.marker_id(_THOUGHT))
        self._reasons = None not in self._think_ids
        self._markers = (*syntax.markers, *((_THINK, _THOUGHT) if self._reasons else ()))
        marker_ids = {tokenizer.marker_id(marker) for marker in syntax.markers}
        self._silent_ids = tokenizer.eos_ids - marker_ids

    def read(self, output: SampledOutput, tools: Sequence[Json]) -> ParsedOutput:
        """Content, reasoning and tool calls of `output`; without `tools` nothing is a call."""
        ids = list(output.ids)
        if ids and ids[-1] in self._silent_ids:
            ids.pop()
        pieces = cut_ids(self._tokenizer, ids, self._markers)
        if output.stop is not None:
            pieces = cut_before(pieces, output.stop)
        pieces = cut_ids(self._tokenizer, output.forced_ids, self._markers) + pieces
        is_open = False  # unless the generation prompt began the reasoning
        if self._reasons:
            turning_points = {*self._think_ids, *self._tokenizer.eos_ids}
            last = next((token_id for token_id in reversed(output.context_ids) if token_id in turning_points), None)
            is_open = last == self._think_ids[0]
        split = _split_reasoning(pieces, is_open, self.syntax.markers)
        is_read = bool(tools) or self.syntax.frames_answers
        parsed = self.syntax.parse(split.rest, tools) if is_read else ParsedOutput(_text(split.rest))
        return replace(parsed, reasoning=split.reasoning) if split.reasoning else parsed

    def call_beginning_ids(self, name: str | None) -> list[int]:
        """How an answer that must be a call (of `name`) begins; the name is the agent's text and forges no marker."""
        ours, named = self.syntax.beginning(name)
        return self._tokenizer.encode(ours) + (self._tokenizer.encode_plain(named) if named else [])


class _Split(NamedTuple):
    reasoning: str
    rest: Sequence[Piece]


def _split_reasoning(pieces: Sequence[Piece], is_open: bool, call_markers: Sequence[str]) -> _Split:
    """Reasoning, and what follows it; reasoning that was never closed ends where a call begins."""
    begin = 0
    if not is_open:
        begin = next((i + 1 for i, piece in enumerate(pieces) if piece.is_marker or piece.text.strip()), 0)
        if not begin or pieces[begin - 1] != _THINK_PIECE:
            return _Split("", pieces)
    end = pieces.index(_THOUGHT_PIECE, begin) if _THOUGHT_PIECE in pieces[begin:] else None
    if end is not None:
        rest = list(pieces[end + 1 :])
        if rest and not rest[0].is_marker:
            rest[0] = Piece(rest[0].text.lstrip("\n"))
        return _Split(_text(pieces[begin:end]).strip("\n"), rest)
    calls = (i for i in range(begin, len(pieces)) if pieces[i].is_marker and pieces[i].text in call_markers)
    end = next(calls, len(pieces))
    return _Split(_text(pieces[begin:end]).strip("\n"), pieces[end:])


def _text(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)

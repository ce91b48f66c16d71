"""Reader of a model family's outputs: content, reasoning, and calls in its syntax, without what ended them."""

from collections.abc import Mapping, Sequence
from itertools import chain

from harness.errors import MalformedRequest
from harness.tokens.chat_tokenizer import SampledOutput
from harness.tokens.outputs.output_stream import OutputStream
from harness.tokens.outputs.pieces import Markers, StopGate
from harness.tokens.outputs.reasoning import ANSWER_MARKERS, REASONING_MARKERS, ReasoningSplit, find_markers
from harness.tokens.parsing import CallSyntax, ParsedOutput, Piece, TextReader, as_malformed
from harness.tokens.syntaxes.harmony import Harmony
from harness.tokens.syntaxes.json_calls import LlamaJson, Mistral, MistralNamed
from harness.tokens.syntaxes.marked_calls import HERMES, MARKED
from harness.tokens.tokenizer import Tokenizer
from harness.types import Json

_SIGNS: Mapping[tuple[str, ...], CallSyntax] = {
    ("<|channel|>", "<|message|>"): Harmony(),
    **MARKED,
    ("[TOOL_CALLS]", "[ARGS]"): MistralNamed(),
    ("[TOOL_CALLS]",): Mistral(),
    ("<|start_header_id|>", '"parameters": '): LlamaJson(),
}
"""Texts that reveal a template's syntax. The first row that fits decides."""


def call_syntax_of(*texts: str) -> CallSyntax:
    """Return the syntax that the first of a template's `texts` reveals, or Hermes if none does."""
    fitting = (each for text in texts for signs, each in _SIGNS.items() if all(sign in text for sign in signs))
    return next(fitting, HERMES)


class Unread(CallSyntax):
    """Calls in an unknown syntax with a marker of their own: recognized, and malformed content."""

    name = "unread"
    markers: tuple[str, ...] = ()

    def __init__(self, marker: str) -> None:
        self.markers = (marker,)

    def beginning(self, name: str | None) -> tuple[str, str]:
        """Raise `MalformedRequest`."""
        raise MalformedRequest(
            "tool_choice: expected 'auto' or 'none', the server cannot read the tool calls of this model's template",
            param="tool_choice",
        )

    def parse(self, pieces: Sequence[Piece], tools: Sequence[Json]) -> ParsedOutput:
        return as_malformed(pieces)


_MOST_MARKER_IDS = 64  # of a marker that is spelled out, with the white space behind it


class OutputReader:
    def __init__(
        self,
        tokenizer: Tokenizer,
        syntax: CallSyntax,
        template_source: str = "",
        *,
        reasoning: tuple[str, str] | None = None,
        answers: Mapping[str, str] | None = None,
    ) -> None:
        """Use `reasoning` for the markers that vocabulary and template show, and `answers` around content."""
        self.syntax = syntax
        self._tokenizer = tokenizer
        self._reasoning = reasoning or find_markers(tokenizer, template_source)
        self._begin = (self._reasoning or REASONING_MARKERS[0])[0]
        self._begin_id, self._end_id = ids = [*map(tokenizer.marker_id, self._reasoning or ("", ""))]
        self._turning_points = {*ids, *tokenizer.eos_ids}
        self._answers = [each for each in chain(*ANSWER_MARKERS.items()) if tokenizer.marker_id(each) is not None]
        self._answers += chain(*(answers or {}).items())
        self._markers = Markers(tokenizer, (*syntax.markers, *(self._reasoning or ()), *self._answers))
        pair = "".join(self._reasoning or ())
        self.own_markers = {"<tool_call>", "</tool_call>", *(each.group() for each in tokenizer.find_markers(pair))}
        """Markers that structure an answer and do not end it: a replayed one keeps them."""
        marker_ids = {tokenizer.marker_id(marker) for marker in syntax.markers}
        self._silent_ids = tokenizer.eos_ids - marker_ids
        self._structure_ids = frozenset({*map(tokenizer.marker_id, tokenizer.added_tokens)} - marker_ids)

    def read(self, output: SampledOutput, tools: Sequence[Json]) -> ParsedOutput:
        """Return the parts of a whole output. Without `tools` nothing is a call."""
        stream = self.open(output, tools, () if output.stop is None else (output.stop,))
        stream.push(output.ids)
        return stream.end(output.stop)

    def open(
        self,
        output: SampledOutput,
        tools: Sequence[Json],
        stops: Sequence[str] = (),
        stop_ids: frozenset[int] = frozenset(),
    ) -> OutputStream:
        split = None
        if self._reasoning or self._answers:
            is_open = self.ends_in_reasoning(output.context_ids)
            split = ReasoningSplit(self._reasoning or ("", ""), self.syntax.markers, is_open=is_open)
        is_read = bool(tools) or self.syntax.frames_answers
        stream = OutputStream(
            self._markers,
            StopGate(stops),
            split,
            self.syntax.open(tools) if is_read else TextReader(),
            silent_ids=self._silent_ids,
            stop_ids=stop_ids,
        )
        if output.forced_ids:
            stream.begin(output.forced_ids)
        return stream

    def ends_in_reasoning(self, context_ids: Sequence[int]) -> bool:
        if self._begin_id is None:  # spelled out, as other messages may spell it, too
            tail = self._tokenizer.decode(context_ids[-_MOST_MARKER_IDS:])
            return self._reasoning is not None and tail.rstrip().endswith(self._begin)
        turned = (token_id for token_id in reversed(context_ids) if token_id in self._turning_points)
        return next(turned, None) == self._begin_id

    def is_plain(self, context_ids: Sequence[int], ids: Sequence[int]) -> bool:
        """Return True if `ids` have no markers except of calls and of finished reasoning."""
        if self._begin_id is None and self._begin in self._tokenizer.decode(ids):
            return False
        if self._structure_ids.isdisjoint(ids):
            return not self.ends_in_reasoning(context_ids)
        found = [token_id for token_id in ids if token_id in self._structure_ids]
        return found[-1] == self._end_id and not {*found} - {self._begin_id, self._end_id}

    def call_beginning_ids(self, name: str | None, context_ids: Sequence[int] = ()) -> list[int]:
        ours, named = self.syntax.beginning(name)
        if self._reasoning is not None and self.ends_in_reasoning(context_ids):
            ours = f"{self._reasoning[1]}\n\n{ours}"
        # The name is the agent's text. Plain encoding keeps it from forging a marker.
        return self._tokenizer.encode(ours) + (self._tokenizer.encode_plain(named) if named else [])

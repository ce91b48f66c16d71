"""Reader of one output while it is sampled.

Ids become pieces (`outputs.pieces`), pieces reasoning and the rest (`outputs.reasoning`), the rest content and calls (a
`CallReader`). Returned text is never taken back.
"""

from collections.abc import Sequence

from harness.tokens.outputs.pieces import Markers, PieceCutter, StopGate
from harness.tokens.outputs.reasoning import ReasoningSplit, Split
from harness.tokens.parsing import CallReader, Delta, ParsedOutput, Piece


class OutputStream:
    """Reader of one output. At its end `silent_ids` are no content; `stop_ids` wait because they may end it."""

    def __init__(
        self,
        markers: Markers,
        gate: StopGate,
        split: ReasoningSplit | None,
        reader: CallReader,
        *,
        silent_ids: frozenset[int],
        stop_ids: frozenset[int],
    ) -> None:
        self._markers = markers
        self._cutter = PieceCutter(markers)
        self._gate = gate
        self._split = split
        self._reader = reader
        self._silent_ids = silent_ids
        self._last_ids = silent_ids | stop_ids
        self._last: list[int] = []
        self._reasoning: list[str] = []
        self._content: list[str] = []

    def begin(self, forced_ids: Sequence[int]) -> None:
        """Take in the prompt ids that belong to the output. No stop string is sought in them."""
        cutter = PieceCutter(self._markers)
        self._read([*cutter.push(forced_ids), *cutter.end()])

    def push(self, ids: Sequence[int]) -> Delta:
        given = [*self._last, *ids]
        left = len(given) - (bool(given) and given[-1] in self._last_ids)
        self._last = given[left:]
        return self._read(self._gate.push(self._cutter.push(given[:left])))

    def end(self, stop: str | None = None) -> ParsedOutput:
        """Return the whole output, which ended here, maybe with a stop string."""
        last = [token_id for token_id in self._last if token_id not in self._silent_ids]
        self._read(self._gate.push([*self._cutter.push(last), *self._cutter.end()]))
        self._read(self._gate.end(stop))
        if self._split is not None:
            self._take(self._split.end())
        left = self._reader.end()
        return ParsedOutput(
            "".join(self._content) + left.content,
            left.tool_calls,
            left.malformed,
            "".join(self._reasoning) + left.reasoning,
        )

    def _read(self, pieces: Sequence[Piece]) -> Delta:
        reasoning = content = ""
        for piece in pieces:
            delta = self._take(Split(rest=(piece,)) if self._split is None else self._split.push(piece))
            reasoning += delta.reasoning
            content += delta.content
        return Delta(reasoning, content)

    def _take(self, split: Split) -> Delta:
        reasoning, content = split.reasoning, ""
        for piece in split.rest:
            delta = self._reader.push(piece)
            reasoning += delta.reasoning
            content += delta.content
        self._reasoning.append(reasoning)
        self._content.append(content)
        return Delta(reasoning, content)

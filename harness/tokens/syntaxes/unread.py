"""Tool calls in an unknown syntax, recognized and not read: an answer with one is malformed content."""

from collections.abc import Sequence

from harness.errors import MalformedRequest
from harness.tokens.parsing import CallSyntax, ParsedOutput, Piece, as_malformed
from harness.types import Json


class Unread(CallSyntax):
    """Calls with a marker that no other answer has."""

    name = "unread"

    def __init__(self, marker: str) -> None:
        self._marker = marker

    @property
    def markers(self) -> tuple[str, ...]:
        return (self._marker,)

    def beginning(self, name: str | None) -> tuple[str, str]:
        """Raise `MalformedRequest`."""
        raise MalformedRequest(
            "tool_choice: expected 'auto' or 'none', the server cannot read the tool calls of this model's template",
            param="tool_choice",
        )

    def parse(self, pieces: Sequence[Piece], tools: Sequence[Json]) -> ParsedOutput:
        return as_malformed(pieces)

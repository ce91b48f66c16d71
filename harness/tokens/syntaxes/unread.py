"""Tool calls of a family whose syntax is not known here: they are recognized and not read.

An answer with one is content as it stands, and malformed. It is never read in the syntax of another family.
"""

from collections.abc import Sequence

from harness.errors import MalformedRequest
from harness.tokens.parsing import CallSyntax, ParsedOutput, Piece, as_malformed
from harness.types import Json


class Unread(CallSyntax):
    """Calls that begin with, or have in them, a marker that no other answer has."""

    name = "unread"

    def __init__(self, marker: str) -> None:
        self._marker = marker

    @property
    def markers(self) -> tuple[str, ...]:
        """See `CallSyntax`."""
        return (self._marker,)

    def beginning(self, name: str | None) -> tuple[str, str]:
        """Raises `MalformedRequest`: how a call begins is not known."""
        del name
        raise MalformedRequest(
            "tool_choice: expected 'auto' or 'none', the server cannot read the tool calls of this model's template",
            param="tool_choice",
        )

    def parse(self, pieces: Sequence[Piece], tools: Sequence[Json]) -> ParsedOutput:
        """The output as it stands."""
        del tools
        return as_malformed(pieces)

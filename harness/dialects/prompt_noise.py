"""Noise at the head of a prompt: text that a client changes with every request.

Without a common prefix each call would be its own root. Content rules identify noise, whichever client sends it, in
system and developer prompts only. It is removed before histories are compared, so neither engine nor record has it.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from harness.dialects.model_request import ModelRequest, PartlyRead
from harness.errors import ScenarioError
from harness.types import Message

BILLING_HEADER = r"x-anthropic-billing-header:[^\n]*\n?"
"""A line with a checksum of the request."""

_LONGEST_NOTE = 500  # characters


class CleanRequest(NamedTuple):
    request: ModelRequest
    noise: str
    """Beginning of the removed text; empty if none, or if the head was known before."""


class NoiseRules:
    """Patterns removed repeatedly from the start of the first message."""

    def __init__(self, patterns: Iterable[str]) -> None:
        """Compile `patterns`. Raises `ScenarioError` if one is invalid or matches the empty text."""
        texts = list(patterns)
        try:
            self._pattern = re.compile("|".join(f"(?:{text})" for text in texts)) if texts else None
        except re.error as error:
            raise ScenarioError(f"noise: expected regular expressions, got {texts}: {error}") from error
        if self._pattern is not None and self._pattern.match("") is not None:
            raise ScenarioError(f"noise: expected patterns that match some text, one of {texts} matches the empty one")

    def take_out(self, request: ModelRequest) -> CleanRequest:
        """Remove noise from `request`. Reads the first message only if it was not known before."""
        if self._pattern is None:
            return CleanRequest(request, "")
        if isinstance(request.messages, PartlyRead):
            quiet = request.messages.with_first(self.clean)
            return CleanRequest(msgspec.structs.replace(request, messages=quiet), "")
        head = request.messages[0]
        end = self._end(head)
        if not end:
            return CleanRequest(request, "")
        messages = (self.clean(head), *request.messages[1:])
        return CleanRequest(
            msgspec.structs.replace(request, messages=messages), head["content"][: min(end, _LONGEST_NOTE)]
        )

    def clean(self, head: Message) -> Message:
        end = self._end(head)
        return {**head, "content": head["content"][end:]} if end else head

    def _end(self, head: Message) -> int:
        text, end = head.get("content") or "", 0
        if head["role"] not in ("system", "developer"):
            return 0
        while self._pattern is not None and (found := self._pattern.match(text, end)) is not None and found.end() > end:
            end = found.end()
        return end

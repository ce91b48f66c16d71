"""Noise at the head of a prompt: what a client puts there anew with every request, and no model should see.

A conversation whose first words differ each time has no prefix in common with the one before: every call would be a
root of its own. Rules on content say what is noise, whichever client sends it; only a system or developer prompt has
any, what a user says is read. It is taken out before histories are compared, so that what goes to the engine and what
is recorded is the conversation without it.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, overload

from harness.dialects.model_request import ModelRequest
from harness.errors import ScenarioError
from harness.types import Message

BILLING_HEADER = r"x-anthropic-billing-header:[^\n]*\n?"
"""A line with a checksum of the request."""

_LONGEST_NOTE = 500  # characters


class Quiet(NamedTuple):
    """A request without noise."""

    request: ModelRequest
    noise: str
    """The beginning of what was taken out; empty where nothing was, or where the head was known before."""


class NoiseRules:
    """Patterns of what is taken out of the first message, as long as one of them matches its beginning."""

    def __init__(self, patterns: Iterable[str]) -> None:
        """Raises `ScenarioError` when one of `patterns` is no regular expression, or matches nothing at all."""
        texts = list(patterns)
        try:
            self._pattern = re.compile("|".join(f"(?:{text})" for text in texts)) if texts else None
        except re.error as error:
            raise ScenarioError(f"noise: expected regular expressions, got {texts}: {error}") from error
        if self._pattern is not None and self._pattern.match("") is not None:
            raise ScenarioError(f"noise: expected patterns that match some text, one of {texts} matches the empty one")

    def take_out(self, request: ModelRequest) -> Quiet:
        """`request` without noise; its first message is read only when it was not known before."""
        if self._pattern is None:
            return Quiet(request, "")
        if request.recall.known:
            return Quiet(replace(request, messages=_QuietHead(request.messages, self)), "")
        head = request.messages[0]
        end = self._end(head)
        if not end:
            return Quiet(request, "")
        messages = (self.clean(head), *request.messages[1:])
        return Quiet(replace(request, messages=messages), head["content"][: min(end, _LONGEST_NOTE)])

    def clean(self, head: Message) -> Message:
        """The first message without noise."""
        end = self._end(head)
        return {**head, "content": head["content"][end:]} if end else head

    def _end(self, head: Message) -> int:
        """Where the noise of a first message ends; 0 where it has none."""
        text, end = head.get("content") or "", 0
        if head["role"] not in ("system", "developer"):
            return 0
        while self._pattern is not None and (found := self._pattern.match(text, end)) is not None and found.end() > end:
            end = found.end()
        return end


class _QuietHead(Sequence[Message]):
    """Messages of which the first is cleaned when somebody asks for it."""

    def __init__(self, messages: Sequence[Message], rules: NoiseRules) -> None:
        self._messages = messages
        self._rules = rules

    def __len__(self) -> int:
        return len(self._messages)

    @overload
    def __getitem__(self, index: int) -> Message: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Message, ...]: ...

    def __getitem__(self, index: int | slice) -> Message | tuple[Message, ...]:
        if isinstance(index, slice):
            said = tuple(self._messages[index])
            numbers = range(len(self))[index]
            if 0 not in numbers:
                return said
            at = numbers.index(0)
            return (*said[:at], self._rules.clean(said[at]), *said[at + 1 :])
        message = self._messages[index]
        return self._rules.clean(message) if index in (0, -len(self)) else message

"""Text of an output that is sent while it is sampled, and its agreement with the recorded reply.

Sent text cannot be taken back, so nothing more is sent once the kept ids differ from those that came. A reply that does
not begin with the sent text is not served on that stream.
"""

from collections.abc import Callable, Sequence

from harness.tokens.outputs.output_stream import OutputStream
from harness.tokens.parsing import Delta
from harness.types import Message


class LiveText:
    def __init__(self, tell: Callable[[], None] = lambda: None) -> None:
        self.tell = tell
        self._stream: OutputStream | None = None
        self._came: list[int] = []
        self._read = 0
        self._is_shut = False
        self._reasoning: list[str] = []
        self._content: list[str] = []

    @property
    def is_open(self) -> bool:
        """True if ids are wanted as they come."""
        return self._stream is not None and not self._is_shut

    @property
    def has_spoken(self) -> bool:
        return bool(self._reasoning or self._content)

    def open(self, stream: OutputStream) -> None:
        self._stream = stream

    def hear(self, ids: Sequence[int]) -> None:
        if self.is_open and ids:
            self._came += ids
            self.tell()

    def settle(self, ids: Sequence[int]) -> None:
        """Compare with the ids kept so far, and take in the rest of them."""
        if not self.is_open:
            return
        known = len(self._came)
        self._is_shut = list(ids[:known]) != self._came
        self.hear(list(ids[known:]))

    def take(self) -> Delta:
        """Return the text that became final since the last call."""
        if self._stream is None or not self.is_open:
            return Delta()
        delta = self._stream.push(self._came[self._read :])
        self._read = len(self._came)
        # No dialect has reasoning after content, so the stream falls silent.
        if delta.reasoning and self._content:
            self._is_shut = True
            return Delta()
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
        if delta.content:
            self._content.append(delta.content)
        return delta

    def agrees_with(self, reply: Message) -> bool:
        reasoning, content = "".join(self._reasoning), "".join(self._content)
        said, replied = (reasoning, content), (reply.get("reasoning_content") or "", reply.get("content") or "")
        # Reasoning is sent before content, so once content went out it must have been complete.
        if content and said[0] != replied[0]:
            return False
        return all(whole.startswith(part) for whole, part in zip(replied, said, strict=True))

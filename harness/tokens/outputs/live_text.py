"""The text of an output that goes out while it is sampled, and whether that agrees with the reply that is recorded.

Ids come as an engine samples them; those that are kept are known later, when a request has ended or has broken. Text
that has gone out cannot be taken back, so nothing more goes out once ids were kept that are not those that came, and in
the end the reply is compared with what was said: one that does not begin so is not served on that stream.
"""

from collections.abc import Callable, Sequence

from harness.tokens.outputs.output_stream import OutputStream
from harness.tokens.parsing import Delta
from harness.types import Message


class LiveText:
    """What is said of one answer in the making; silent until it is opened."""

    def __init__(self, tell: Callable[[], None] = lambda: None) -> None:
        self.tell = tell
        """Called when there may be something to say."""
        self._stream: OutputStream | None = None
        self._came: list[int] = []
        self._read = 0
        self._is_shut = False
        self._reasoning: list[str] = []
        self._content: list[str] = []

    @property
    def is_open(self) -> bool:
        """Somebody wants ids as they come."""
        return self._stream is not None and not self._is_shut

    @property
    def has_spoken(self) -> bool:
        """Some text has been taken."""
        return bool(self._reasoning or self._content)

    def open(self, stream: OutputStream) -> None:
        """Begin with an output that `stream` reads."""
        self._stream = stream

    def hear(self, ids: Sequence[int]) -> None:
        """Take in the next ids that were sampled."""
        if self.is_open and ids:
            self._came += ids
            self.tell()

    def settle(self, ids: Sequence[int]) -> None:
        """Compare with the output as it is kept so far, and take in what of it was not heard."""
        if not self.is_open:
            return
        known = len(self._came)
        self._is_shut = list(ids[:known]) != self._came
        self.hear(list(ids[known:]))

    def take(self) -> Delta:
        """The text that has become final since the last time; reasoning that comes behind content is not said."""
        if self._stream is None or not self.is_open:
            return Delta()
        delta = self._stream.push(self._came[self._read :])
        self._read = len(self._came)
        if delta.reasoning and self._content:
            self._is_shut = True
            return Delta()
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
        if delta.content:
            self._content.append(delta.content)
        return delta

    def agrees_with(self, reply: Message) -> bool:
        """Whether the reply begins with what was said; its reasoning is said before its content."""
        reasoning, content = "".join(self._reasoning), "".join(self._content)
        said, replied = (reasoning, content), (reply.get("reasoning_content") or "", reply.get("content") or "")
        if content and said[0] != replied[0]:
            return False
        return all(whole.startswith(part) for whole, part in zip(replied, said, strict=True))

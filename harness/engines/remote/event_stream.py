"""The payloads of a server-sent event stream, from the bytes as they arrive.

Engines send one JSON document per event on one `data:` line, and `[DONE]` at the end. A document may be megabytes
long (SGLang repeats the whole output in every event), so the buffer is its own: the line readers of HTTP clients give
up at 64 KiB. Every byte is looked at once, however the network cuts the stream.
"""

_DONE = b"[DONE]"
_LONGEST_LINE_BYTES = 64 << 20


class LineTooLong(ValueError):
    """The stream holds a line that no engine would send."""


class EventBuffer:
    """Collects the bytes of one stream; `is_done` once the end marker has come."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self._searched = 0
        self.is_done = False

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that `data` completes, in order, up to the end marker. Raises `LineTooLong`."""
        self._pending += data
        payloads = []
        while not self.is_done and (line := self._next_line()) is not None:
            if not line.startswith(b"data:"):  # comments, event names, separators
                continue
            payload = line[5:].strip()
            self.is_done = payload == _DONE
            if payload and not self.is_done:
                payloads.append(payload)
        return payloads

    def _next_line(self) -> bytes | None:
        end = self._pending.find(b"\n", self._searched)
        if end < 0:
            self._searched = len(self._pending)
            if self._searched > _LONGEST_LINE_BYTES:
                raise LineTooLong(f"a line of more than {_LONGEST_LINE_BYTES} bytes")
            return None
        line = bytes(self._pending[:end])
        del self._pending[: end + 1]
        self._searched = 0
        return line

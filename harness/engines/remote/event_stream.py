"""Splits a stream of server-sent events into payloads.

Engines send one JSON document per `data:` line, which may be megabytes long because SGLang repeats the output in every
event. Line readers of HTTP clients stop at 64 KiB.
"""

_DONE = b"[DONE]"
_LONGEST_LINE_BYTES = 64 << 20


class LineTooLong(ValueError):
    """Raised for an impossibly long line."""


class EventBuffer:
    """Buffer of one stream; `is_done` after the end marker."""

    def __init__(self, row_bytes: int = 0) -> None:
        self._most_bytes = _LONGEST_LINE_BYTES + row_bytes
        self._line: list[bytes] = []
        """Pieces of an incomplete line."""
        self._line_bytes = 0
        self.is_done = False

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads that `data` completes, up to the end marker. Raises `LineTooLong`."""
        # Every byte is examined once, however the network splits the stream.
        payloads: list[bytes] = []
        begin = 0
        while (end := data.find(b"\n", begin)) >= 0 and not self.is_done:  # `split` looks at one byte at a time
            line = data[begin:end]
            if self._line:
                line = b"".join((*self._line, line))
                self._line, self._line_bytes = [], 0
            begin = end + 1
            payload = line[5:].strip() if line.startswith(b"data:") else b""  # else a comment, a name, a separator
            self.is_done = payload == _DONE
            if payload and not self.is_done:
                payloads.append(payload)
        if begin < len(data):
            self._line.append(data[begin:])
            self._line_bytes += len(data) - begin
        if self._line_bytes > self._most_bytes:
            raise LineTooLong(f"a line of more than {self._most_bytes} bytes")
        return payloads

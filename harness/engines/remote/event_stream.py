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
        self._line: list[bytes] = []
        """The beginning of a line, in pieces."""
        self._line_bytes = 0
        self.is_done = False

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that `data` completes, in order, up to the end marker. Raises `LineTooLong`."""
        begun = data.rfind(b"\n") + 1
        lines: list[bytes] = []
        if begun:
            lines = b"".join((*self._line, data[:begun])).split(b"\n")
            self._line, self._line_bytes = [], 0
        self._line.append(data[begun:])
        self._line_bytes += len(data) - begun
        if self._line_bytes > _LONGEST_LINE_BYTES:
            raise LineTooLong(f"a line of more than {_LONGEST_LINE_BYTES} bytes")
        payloads = []
        for line in lines:
            payload = line[5:].strip() if line.startswith(b"data:") else b""  # else a comment, a name, a separator
            self.is_done |= payload == _DONE
            if self.is_done:
                break
            if payload:
                payloads.append(payload)
        return payloads

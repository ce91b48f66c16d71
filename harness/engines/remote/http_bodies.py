"""Bodies of engine servers' answers: errors as typed ones, and streams of server-sent events. Pure.

Engines put the message into `error`, `message` or `detail`, as text or an object with a `message`. Within a stream,
whose status was already sent, the same object comes as an event.
"""

from typing import Any

import msgspec

from harness.decoding import read_json
from harness.errors import EngineError, EngineRejected, EngineUnavailable

_EXCERPT_CHARACTERS = 300
_DONE = b"[DONE]"
_LONGEST_LINE_BYTES = 64 << 20

# SGLang's messages for a request that its scheduler gave up. The status is 503, as for a full queue, though the request
# had run. Its tokens are not in the answer.
_HAD_BEGUN = (
    "Request running timeout reached",
    "Request waiting timeout reached",
    "Retracted under decode memory pressure",
    "aborted by a higher priority request",
)


class _ErrorBody(msgspec.Struct):
    error: Any = None
    message: Any = None
    detail: Any = None


def error_for_status(status: int, message: str) -> EngineError:
    if status in (429, 503):
        error = EngineUnavailable(message)
        error.may_have_sampled = any(words in message for words in _HAD_BEGUN)
        return error
    return EngineRejected(message) if 400 <= status < 500 else EngineError(message)


def error_in_event(name: str, error: Any) -> EngineError:
    """Return the error in a stream's event; `name` prefixes its message."""
    detail = error if isinstance(error, dict) else {"message": error}
    code = detail.get("code")
    return error_for_status(code if isinstance(code, int) else 500, f"{name}: {shorten(str(detail.get('message')))}")


def server_message(content: bytes) -> str:
    """Return the shortened message of an error body."""
    try:
        body = read_json(content, _ErrorBody)
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError):
        return excerpt(content)
    found = body.error or body.message or body.detail
    text = found.get("message", found) if isinstance(found, dict) else found
    return shorten(str(text)) if text else excerpt(content)


def excerpt(content: bytes) -> str:
    """Return the beginning of a body, for messages."""
    return repr(shorten(content.decode("utf-8", errors="replace"))) if content else "an empty body"


def shorten(text: str) -> str:
    """Return `text`, cut after a few lines."""
    return text if len(text) <= _EXCERPT_CHARACTERS else f"{text[:_EXCERPT_CHARACTERS]}..."


class LineTooLong(ValueError):
    """Raised for an impossibly long line."""


class EventBuffer:
    """Splits a stream of events into payloads, one JSON document per `data:` line; `is_done` after the end marker.

    A line may be megabytes long, because SGLang repeats the output in every event.
    """

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

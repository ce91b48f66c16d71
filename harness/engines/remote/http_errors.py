"""An engine server's refusals: statuses and error bodies as typed errors. Pure.

Engines put their words into `error`, `message` or `detail`, as text or as an object with a `message`; within a stream
they send the same object as an event, because the status has gone out already.
"""

from typing import Any

import msgspec

from harness.errors import EngineError, EngineRejected, EngineUnavailable

_EXCERPT_CHARACTERS = 300

# SGLang's words for a request that its scheduler has given up: a 503 like that of a full queue, though the request ran,
# or waited again after it had run. Its tokens are not in the answer.
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
    """The error that an HTTP status of an engine stands for."""
    if status in (429, 503):
        error = EngineUnavailable(message)
        error.may_have_sampled = any(words in message for words in _HAD_BEGUN)
        return error
    return EngineRejected(message) if 400 <= status < 500 else EngineError(message)


def error_in_event(name: str, error: Any) -> EngineError:
    """The error that an event of a stream carries; `name` says whose it is."""
    detail = error if isinstance(error, dict) else {"message": error}
    code = detail.get("code")
    return error_for_status(code if isinstance(code, int) else 500, f"{name}: {shorten(str(detail.get('message')))}")


def server_message(content: bytes) -> str:
    """The words of an error body, shortened."""
    try:
        body = msgspec.json.decode(content, type=_ErrorBody)
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError):
        return excerpt(content)
    found = body.error or body.message or body.detail
    text = found.get("message", found) if isinstance(found, dict) else found
    return shorten(str(text)) if text else excerpt(content)


def excerpt(content: bytes) -> str:
    """The beginning of a body, for messages."""
    return repr(shorten(content.decode("utf-8", errors="replace"))) if content else "an empty body"


def shorten(text: str) -> str:
    """At most a few lines of `text`."""
    return text if len(text) <= _EXCERPT_CHARACTERS else f"{text[:_EXCERPT_CHARACTERS]}..."

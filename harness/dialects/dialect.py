"""The seam between the server and the client APIs, and the table of those it serves.

A dialect defines routes, the meaning of requests and the form of answers, streams and errors. It takes and returns
values. The server does the rest alike for all dialects: authorization, the life of a turn, retries, HTTP status,
`x-should-retry`, `retry-after` and the time of a keep-alive. docs/extending.md adds a dialect.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from harness.dialects.anthropic_messages import AnthropicMessages
from harness.dialects.gemini import Gemini
from harness.dialects.model_request import AnswerHead, ModelAnswer, ModelRequest, WireCall
from harness.dialects.openai_chat import OpenAIChat
from harness.dialects.openai_responses import OpenAIResponses
from harness.dialects.request_limits import RequestLimits
from harness.errors import HarnessError
from harness.tokens.history import History
from harness.tokens.parsing import Delta
from harness.types import Json


class AnswerStream(Protocol):
    """Writer of one streamed answer as server-sent events (`dialects.sse`)."""

    @property
    def has_told_id(self) -> bool:
        """True once the response id was sent and clients can continue from it. The final answer must carry that id."""

    def keep_alive(self) -> bytes:
        """Return an event that only says the answer is in progress. The first one begins the stream.

        Not an SSE comment: clients that give up on a silent stream do not count those.
        """

    def say(self, delta: Delta) -> bytes:
        """Return the events for text sampled so far. The final answer begins with it. No reasoning follows content."""

    def end(self, answer: ModelAnswer) -> Iterator[bytes]:
        """Yield the rest of the answer, in order. Its turn is recorded."""

    def fail(self, error: HarnessError, message: str) -> bytes:
        """Return the end of a stream whose request failed. The response id is its request id."""


class Dialect(Protocol):
    """An API that clients speak."""

    name: str
    """Name recorded with each request."""
    path: str
    """Path of model calls, below a session's base URL. It may have parameters, as `{model}`."""
    stored_path: str | None
    """Path of an answer by its `{response_id}`; None if the API has none."""

    def client_variables(self, session_url: str, api_key: str, model: str) -> dict[str, str]:
        """Return the environment variables that point clients at a session."""

    def parse(self, call: WireCall, limits: RequestLimits, history: History) -> ModelRequest:
        """Return the request in `call`, reading only what `history` lacks. Raises `MalformedRequest` or `OverLimit`."""

    def answer(self, answer: ModelAnswer) -> Json:
        """Return the body of a whole answer."""

    def stream(self, head: AnswerHead) -> AnswerStream:
        """Return the writer of a streamed answer."""

    def error_body(self, error: HarnessError, message: str, request_id: str) -> Json:
        """Return the body of an error answer with `message`. The server logs the error under `request_id`."""


@runtime_checkable
class CountingDialect(Dialect, Protocol):
    """An API that can also count the tokens of a prompt."""

    count_path: str
    """Path of the count, below `path`, with the same body as a call."""

    def count_answer(self, tokens: int) -> Json:
        """Return the body of the answer."""


DIALECTS: tuple[Dialect, ...] = (OpenAIChat(), AnthropicMessages(), OpenAIResponses(), Gemini())
"""Every dialect the server serves. The first one formats answers to requests of no dialect."""


def dialect_of(path: str, dialects: Sequence[Dialect] = DIALECTS) -> Dialect:
    """Return the dialect at or above `path`, after any base URL; else the first one."""
    return find_dialect(path, dialects) or dialects[0]


def name_dialect(path: str) -> str:
    """Return the name of the dialect of `path`, served here or not, or `other`."""
    found = find_dialect(path, DIALECTS)
    return "other" if found is None else found.name


def find_dialect(path: str, dialects: Sequence[Dialect]) -> Dialect | None:
    """Return the dialect at or above `path`, after any base URL."""
    return next((dialect for dialect in dialects if _is_at_or_above(dialect.path, path)), None)


def is_call(path: str) -> bool:
    """Return True for the path of a model call, after any base URL."""
    dialect = find_dialect(path, DIALECTS)
    if isinstance(dialect, CountingDialect) and path.endswith(_end(dialect.count_path)):
        return False
    return dialect is not None and path.endswith(_end(dialect.path))


def _is_at_or_above(pattern: str, path: str) -> bool:
    # Without a regular expression: clients choose paths, and a long one would take long.
    position = 0
    for literal in re.split(r"\{\w+\}", f"{pattern}/"):
        found = f"{path}/".find(literal, position)
        if found < 0:
            return False
        position = found + len(literal)
    return True


def _end(pattern: str) -> str:
    return pattern.rpartition("}")[2]

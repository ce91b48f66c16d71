"""The seam between the server and the APIs that clients speak, and the table of those that it speaks.

A dialect says where its clients ask, what their requests mean and how answers look: the body of a whole one, the parts
of a stream, errors. It takes values and returns values. Everything else is the server's, the same for every dialect:
who may ask, the life of the turn, retries, the HTTP status of an error, `x-should-retry` and `retry-after`, and when a
stream has to be kept alive.

A further dialect is two modules beside `openai_chat_request` and `openai_chat`, and a row of `DIALECTS`; how to write
one is in docs/extending.md.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from harness.dialects.anthropic_messages import AnthropicMessages
from harness.dialects.model_request import AnswerHead, ModelAnswer, ModelRequest, WireCall
from harness.dialects.openai_chat import OpenAIChat
from harness.dialects.openai_responses import OpenAIResponses
from harness.dialects.request_limits import RequestLimits
from harness.errors import HarnessError
from harness.tokens.history import History
from harness.tokens.parsing import Delta
from harness.types import Json


class AnswerStream(Protocol):
    """Writes one streamed answer as server-sent events (`dialects.sse`), part by part."""

    @property
    def has_told_id(self) -> bool:
        """The id of its head has gone out, and clients can go on from it: the answer has to be the one with that id."""

    def keep_alive(self) -> bytes:
        """The part that says no more than that the answer is being worked on; the first one begins the stream.

        It is an event: clients that give up on a silent stream do not count comments.
        """

    def say(self, delta: Delta) -> bytes:
        """Text of the answer that is being sampled: whatever follows, its reasoning and its content begin with that.

        No reasoning comes behind content.
        """

    def end(self, answer: ModelAnswer) -> Iterator[bytes]:
        """The rest of the answer, now that its turn is recorded, in order."""

    def fail(self, error: HarnessError, message: str) -> bytes:
        """The end of a stream that has begun and whose request failed; the response id is its request id."""


class Dialect(Protocol):
    """An API that clients speak."""

    name: str
    """Goes with each of its requests."""
    path: str
    """Where its clients ask, behind the base URL of a session."""
    stored_path: str | None
    """Where they ask for an answer by its `{response_id}`; None when they cannot."""

    def client_variables(self, session_url: str, api_key: str, model: str) -> dict[str, str]:
        """The environment variables by which clients of the dialect find a session."""

    def parse(self, call: WireCall, limits: RequestLimits, history: History) -> ModelRequest:
        """The request in `call`. Raises `MalformedRequest` naming the offending field, `OverLimit` naming the limit.

        It may ask `history` which of the messages need not be read again.
        """

    def answer(self, answer: ModelAnswer) -> Json:
        """The body of a whole answer."""

    def stream(self, head: AnswerHead) -> AnswerStream:
        """The writer of a streamed answer."""

    def error_body(self, error: HarnessError, message: str, request_id: str) -> Json:
        """The body of the answer to a request that failed; `message` is what this client may read of `error`.

        The server's log has the error under `request_id`.
        """


@runtime_checkable
class CountingDialect(Dialect, Protocol):
    """An API whose clients also ask how long a prompt would be."""

    count_path: str
    """Where they ask, with the body that the call itself would have; below `path`."""

    def count_answer(self, tokens: int) -> Json:
        """The body of the answer."""


DIALECTS: tuple[Dialect, ...] = (OpenAIChat(), AnthropicMessages(), OpenAIResponses())
"""Every dialect that a server speaks; the first one gives answers their form that belong to none."""


def dialect_of(path: str, dialects: Sequence[Dialect] = DIALECTS) -> Dialect:
    """The dialect whose clients ask at `path` or above it, behind any base URL; the first one when there is none."""
    return find_dialect(path, dialects) or dialects[0]


def name_dialect(path: str) -> str:
    """The name of the dialect whose clients ask at `path` or above it, served here or not; `other` of none."""
    found = find_dialect(path, DIALECTS)
    return "other" if found is None else found.name


def find_dialect(path: str, dialects: Sequence[Dialect]) -> Dialect | None:
    """The one of `dialects` whose clients ask at `path` or above it, behind any base URL; None when there is none."""
    return next((dialect for dialect in dialects if f"{dialect.path}/" in f"{path}/"), None)

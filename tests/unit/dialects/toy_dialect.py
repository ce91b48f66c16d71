"""A toy dialect, as it is answered."""

from collections.abc import Iterator

from harness.dialects.model_request import AnswerHead, ModelAnswer, ModelRequest, WireCall
from harness.dialects.request_limits import RequestLimits
from harness.dialects.sse import event
from harness.errors import HarnessError
from harness.tokens.history import History
from harness.tokens.parsing import Delta
from harness.types import Json
from tests.unit.dialects.toy_request import NAME, parse_toy


class ToyDialect:
    """Says what the model says, letter by letter where it is wanted aloud."""

    name = NAME
    path = "/toy/questions"
    stored_path: str | None = None

    def client_variables(self, session_url: str, api_key: str, model: str) -> dict[str, str]:
        """See `Dialect`."""
        return {"TOY_URL": session_url, "TOY_KEY": api_key, "TOY_MODEL": model}

    def parse(self, call: WireCall, limits: RequestLimits, history: History) -> ModelRequest:
        """See `Dialect`; reads every message each time."""
        del history
        return parse_toy(call.body, limits)

    def answer(self, answer: ModelAnswer) -> Json:
        """See `Dialect`."""
        return {"said": answer.turn.reply["content"], "turn": answer.turn.index}

    def stream(self, head: AnswerHead) -> "_Stream":
        """See `Dialect`."""
        return _Stream(self, head)

    def error_body(self, error: HarnessError, message: str, request_id: str) -> Json:
        """See `Dialect`."""
        del request_id
        return {"sorry": message, "code": error.code}


class _Stream:
    """Letter by letter."""

    has_told_id = False

    def __init__(self, dialect: ToyDialect, head: AnswerHead) -> None:
        self._dialect = dialect
        self._head = head
        self._patience = 0
        self._said = 0

    def keep_alive(self) -> bytes:
        """See `AnswerStream`."""
        self._patience += 1
        return event({"patience": self._patience - 1})

    def say(self, delta: Delta) -> bytes:
        """See `AnswerStream`; reasoning is not part of its answers."""
        self._said += len(delta.content)
        return b"".join(event({"letter": letter}) for letter in delta.content)

    def end(self, answer: ModelAnswer) -> Iterator[bytes]:
        """See `AnswerStream`."""
        for letter in answer.turn.reply["content"][self._said :]:
            yield event({"letter": letter})
        yield event({"turn": answer.turn.index})

    def fail(self, error: HarnessError, message: str) -> bytes:
        """See `AnswerStream`."""
        return event(self._dialect.error_body(error, message, self._head.response_id))

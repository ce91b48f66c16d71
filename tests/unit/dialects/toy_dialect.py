"""A toy dialect, as it is answered."""

from collections.abc import Iterator

from harness.dialects.model_request import AnswerHead, ModelAnswer, ModelRequest, WireCall
from harness.dialects.request_limits import RequestLimits
from harness.dialects.sse import event
from harness.errors import HarnessError
from harness.tokens.history import History
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

    def keep_alive(self, head: AnswerHead) -> bytes:
        """See `Dialect`."""
        return event({"patience": head.keep_alives})

    def stream_parts(self, answer: ModelAnswer) -> Iterator[bytes]:
        """See `Dialect`."""
        for letter in answer.turn.reply["content"]:
            yield event({"letter": letter})
        yield event({"turn": answer.turn.index})

    def error_body(self, error: HarnessError, message: str, request_id: str) -> Json:
        """See `Dialect`."""
        del request_id
        return {"sorry": message, "code": error.code}

    def error_part(self, error: HarnessError, message: str, head: AnswerHead) -> bytes:
        """See `Dialect`."""
        return event(self.error_body(error, message, head.response_id))

"""How much one request may hold: the operator's limits, and the check of a request's normal form against them.

Whatever the dialect, work and memory grow with these counts: a template runs once per message, an encoder of JSON holds
the interpreter for a whole schema, an engine looks for every stop string at every token. The defaults leave room for a
conversation that fills a context of a million tokens. Text as such has no limit here: whether it fits is a question to
the tokenizer (`tokens.fitting`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final

import msgspec

from harness.errors import OverLimit, ScenarioError
from harness.types import Json, Message, SamplingWishes

_MIB: Final = 1 << 20
_DIGITS: Final = 15


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The most that one request may hold."""

    body_bytes: int = 8 * _MIB
    """Of the body as it is sent; known before anything is parsed, which holds the interpreter for 4 ms per MB."""
    messages: int = 32_768
    """Of a request, and as many tool calls in them: a template runs once for each."""
    tools: int = 1_024
    schema_bytes: int = _MIB
    """JSON of all tools together; also of the schema in `response_format`."""
    arguments_bytes: int = _MIB
    """JSON arguments of one tool call in the history."""
    stop_strings: int = 16
    """Also the most ids in `stop_token_ids`."""
    stop_characters: int = 256
    """Of one stop string."""
    metadata_bytes: int = _MIB
    """JSON of a session's metadata, which every sample carries."""
    script_bytes: int = _MIB
    """JSON of a session's script, which is kept as long as the session is."""
    json_depth: int = 64
    """Levels in tools, schemas and metadata."""
    waiting_bytes: int = 256 * _MIB
    """Of all the requests that wait for a place off the event loop together; beyond that, 503 and `retry-after`."""

    def require(self, limit: str, came: int, param: str) -> None:
        """Raises `OverLimit` naming `param` when `came` is more than the limit of that name."""
        most = getattr(self, limit)
        if came > most:
            what = limit.replace("_", " ")
            raise OverLimit(
                f"{param}: expected at most {most} {what} (the server's limit `{limit}`), got {came}",
                limit=limit,
                param=param,
            )

    def check(
        self,
        messages: Sequence[Message],
        tools: Sequence[Json],
        wishes: SamplingWishes,
        *,
        first: int = 0,
        calls_before: int = 0,
    ) -> None:
        """Raises `OverLimit` when a request in its normal form holds more than this.

        Before these messages there are `first` others, with `calls_before` tool calls, which have been checked.
        """
        self.require("messages", len(messages), "messages")
        calls = sum(len(message.get("tool_calls") or ()) for message in messages)
        self.require("messages", calls_before + calls, "tool_calls")
        self.require("tools", len(tools), "tools")
        self.require("schema_bytes", len(msgspec.json.encode(tools)) if tools else 0, "tools")
        for i, message in enumerate(messages, start=first):
            for call in message.get("tool_calls") or ():
                size_bytes = utf8_bytes(call["function"]["arguments"])
                self.require("arguments_bytes", size_bytes, f"messages[{i}].tool_calls")
        self.check_sampling(wishes)

    def check_sampling(self, wishes: SamplingWishes) -> None:
        """Raises `OverLimit` when an agent, or the owner of a session, asks for more than this."""
        self.require("stop_strings", len(wishes.stop), "stop")
        self.require("stop_strings", len(wishes.stop_token_ids), "stop_token_ids")
        self.require("stop_characters", max(map(len, wishes.stop), default=0), "stop")
        self.require("schema_bytes", utf8_bytes(wishes.json_schema or ""), "response_format")


DEFAULT_LIMITS = RequestLimits()


def read_limits(settings: Sequence[str]) -> RequestLimits:
    """The limits that `settings` state as `name=number`, the others as they are by default.

    Raises `ScenarioError` when one of them is no such thing.
    """
    names = [each.name for each in fields(RequestLimits)]
    stated: dict[str, int] = {}
    for setting in settings:
        name, _, number = setting.partition("=")
        if name not in names or not (number.isdecimal() and 0 < len(number) <= _DIGITS and int(number)):
            raise ScenarioError(
                f"limit: expected NAME=NUMBER with a number above 0 and one of {', '.join(names)}; got {setting!r}"
            )
        stated[name] = int(number)
    return RequestLimits(**stated)


def utf8_bytes(text: str) -> int:
    """Length of `text` in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())

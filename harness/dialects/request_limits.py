"""How much a client may ask for: the operator's limits, and the check of a request's normal form against them.

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
_MOST: Final = 1 << 40
_MOST_BY_NAME: Final = {"json_depth": 500, "header_seconds": 86_400, "body_seconds": 86_400}
"""Of depth, what encoders that recurse can write."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The most that one request may hold, and that clients may ask for at one time."""

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
    connections: int = 8_192
    """At one time, and at most half of the descriptors the server can spare: a turn has one for its engine, too."""
    header_bytes: int = 65_536
    """Of the first line of a request and its header lines together."""
    header_lines: int = 128
    header_seconds: int = 30
    """For them to arrive, from the first byte on."""
    body_seconds: int = 300
    """For the body to arrive."""
    sessions: int = 100_000
    """Held at one time."""
    calls: int = 256
    """Model calls of one session at one time, those that arrive or wait at the gate among them."""
    calls_bytes: int = 64 * _MIB
    """Of their bodies together."""

    def check_numbers(self) -> None:
        """Raises `ScenarioError` naming a limit that cannot be meant: below 1, no whole number, or absurdly large."""
        for name in (each.name for each in fields(self)):
            number, most = getattr(self, name), _MOST_BY_NAME.get(name, _MOST)
            if type(number) is not int or not 1 <= number <= most:
                raise ScenarioError(f"limit {name}: expected a whole number from 1 to {most}, got {number!r}")

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
    limits = RequestLimits(**stated)
    limits.check_numbers()
    return limits


def utf8_bytes(text: str) -> int:
    """Length of `text` in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())

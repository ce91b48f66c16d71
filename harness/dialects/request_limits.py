"""The operator's limits on requests, and the check of a request's normal form against them.

Work and memory grow with these counts: a template runs once per message, a JSON encoder holds the interpreter for a
whole schema, an engine looks for every stop string at every token. The defaults leave room for a context of a million
tokens. Text has no limit here: the tokenizer decides whether it fits (`tokens.fitting`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final

import msgspec

from harness.errors import OverLimit, ScenarioError
from harness.tokens.history import NOTHING_RECALLED, Recall
from harness.types import Json, Message, SamplingWishes

_MIB: Final = 1 << 20
_DIGITS: Final = 15
_MOST: Final = 1 << 40
# Encoders that recurse cannot write JSON deeper than 500 levels.
_MOST_BY_NAME: Final = {"json_depth": 500, "header_seconds": 86_400, "body_seconds": 86_400}


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Most that one request may hold, and that clients may have open at one time."""

    body_bytes: int = 8 * _MIB
    """Bytes of the body as sent. Checked before parsing, which holds the interpreter for 4 ms per MB."""
    messages: int = 32_768
    """Messages of a request, and as many tool calls in them, or parts of Gemini's contents."""
    tools: int = 1_024
    schema_bytes: int = _MIB
    """JSON bytes of all tools, and of the schema in `response_format`."""
    arguments_bytes: int = _MIB
    """JSON bytes of one tool call in the history."""
    stop_strings: int = 16
    """Also the most ids in `stop_token_ids`."""
    stop_characters: int = 256
    """Characters of one stop string."""
    metadata_bytes: int = _MIB
    """JSON bytes of a session's metadata, which every sample carries."""
    script_bytes: int = _MIB
    """JSON bytes of a session's script."""
    json_depth: int = 64
    """Levels in tools, schemas and metadata."""
    waiting_bytes: int = 256 * _MIB
    """Bytes of all requests waiting for work off the event loop. Beyond that: 503 with `retry-after`."""
    connections: int = 8_192
    """Open connections, at most half of the spare descriptors: a turn has one for its engine, too."""
    header_bytes: int = 65_536
    """Bytes of request line and headers."""
    header_lines: int = 128
    header_seconds: int = 30
    """Counted from the first byte."""
    body_seconds: int = 300
    sessions: int = 100_000
    calls: int = 256
    """Concurrent model calls of one session, including those that arrive or wait at the gate."""
    calls_bytes: int = 64 * _MIB
    """Bytes of those calls' bodies."""
    session_row_bytes: int = 1024 * _MIB
    """Bytes of a session's rows (routed experts, sampling masks) in the store."""
    row_bytes: int = 4096 * _MIB
    """Bytes of the rows of all turns in flight."""

    def check_numbers(self) -> None:
        """Raise `ScenarioError` naming a limit that is not a whole number, below 1 or absurdly large."""
        for name in (each.name for each in fields(self)):
            number, most = getattr(self, name), _MOST_BY_NAME.get(name, _MOST)
            # Not `isinstance`, since a bool is an int.
            if type(number) is not int or not 1 <= number <= most:
                raise ScenarioError(f"limit {name}: expected a whole number from 1 to {most}, got {number!r}")

    def require(self, limit: str, came: int, param: str) -> None:
        """Raise `OverLimit` naming `param` if `came` exceeds the limit."""
        most = getattr(self, limit)
        if came > most:
            what = limit.replace("_", " ")
            raise OverLimit(
                f"{param}: expected at most {most} {what} (the server's limit `{limit}`), got {came}",
                limit=limit,
                param=param,
            )

    def require_tools(self, raws: Sequence[msgspec.Raw]) -> None:
        """Raise `OverLimit` for too many or too large tools, as sent."""
        self.require("tools", len(raws), "tools")
        self.require("schema_bytes", sum(memoryview(raw).nbytes for raw in raws), "tools")

    def check(
        self,
        messages: Sequence[Message],
        tools: Sequence[Json],
        wishes: SamplingWishes,
        recall: Recall = NOTHING_RECALLED,
    ) -> None:
        """Raise `OverLimit` if a request exceeds a limit. The messages in `recall` were checked before."""
        self.require("messages", len(messages), "messages")
        new = messages[recall.known :]
        calls = recall.prefixes[-1].calls if recall.prefixes else 0
        self.require("messages", calls + sum(len(message.get("tool_calls") or ()) for message in new), "tool_calls")
        self.require("tools", len(tools), "tools")
        self.require("schema_bytes", len(msgspec.json.encode(tools)) if tools else 0, "tools")
        for i, message in enumerate(new, start=recall.known):
            for call in message.get("tool_calls") or ():
                size_bytes = utf8_bytes(call["function"]["arguments"])
                self.require("arguments_bytes", size_bytes, f"messages[{i}].tool_calls")
        self.check_sampling(wishes)

    def check_sampling(self, wishes: SamplingWishes) -> None:
        """Raise `OverLimit` if sampling settings exceed a limit."""
        self.require("stop_strings", len(wishes.stop), "stop")
        self.require("stop_strings", len(wishes.stop_token_ids), "stop_token_ids")
        self.require("stop_characters", max(map(len, wishes.stop), default=0), "stop")
        self.require("schema_bytes", utf8_bytes(wishes.json_schema or ""), "response_format")


DEFAULT_LIMITS = RequestLimits()


def read_limits(settings: Sequence[str]) -> RequestLimits:
    """Return the limits in `settings` (`name=number`), others at their defaults. Raises `ScenarioError`."""
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
    return len(text) if text.isascii() else len(text.encode())

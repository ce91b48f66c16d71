"""A model call in the one form that all dialects share: what was asked, and what there is to answer.

A dialect reads a `ModelRequest` from a body and writes its answer from a `ModelAnswer`; everything between the two
knows neither JSON nor route of any dialect. Messages and tools have the form of OpenAI's chat completions, in one
spelling: a history that a client sends back, through whichever dialect, is compared with what was recorded in it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import overload

from harness.tokens.history import NOTHING_RECALLED, Recall
from harness.tokens.parsing import ParsedOutput
from harness.types import Json, Message, SamplingWishes, TopLogprobs, Turn


class ToolMode(StrEnum):
    """How far the model is free to call tools."""

    AUTO = "auto"
    """The model decides."""
    NONE = "none"
    """Calls are not parsed; the output is content."""
    REQUIRED = "required"
    """The answer begins as a call."""


@dataclass(frozen=True, slots=True)
class Streaming:
    """How an answer is streamed."""

    wants_usage: bool


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """The demands of a client on the model."""

    dialect: str
    """The name of the dialect in which it asks."""
    messages: Sequence[Message]
    """Those that are known may be read only when somebody asks for them; a slice is a tuple."""
    tools: tuple[Json, ...]
    tool_mode: ToolMode
    tool_name: str | None
    """The function that REQUIRED names, None for any."""
    sampling: SamplingWishes
    wants_logprobs: bool
    model: str
    streaming: Streaming | None = None
    """None when the answer is wanted whole."""
    recall: Recall = NOTHING_RECALLED
    """What is known of it by its bytes."""


class PartlyRead(Sequence[Message]):
    """Messages of which the first `known` are read by `read`, by their number, when somebody asks for them."""

    def __init__(self, known: int, new: tuple[Message, ...], read: Callable[[int], Message]) -> None:
        self._known = known
        self._new = new
        self._read = read

    def __len__(self) -> int:
        return self._known + len(self._new)

    @overload
    def __getitem__(self, index: int) -> Message: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Message, ...]: ...

    def __getitem__(self, index: int | slice) -> Message | tuple[Message, ...]:
        numbers = range(len(self))[index]
        if isinstance(numbers, range):
            return tuple(self[number] for number in numbers)
        return self._new[numbers - self._known] if numbers >= self._known else self._read(numbers)


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """A recorded turn and what else its answer says."""

    request: ModelRequest
    """The request that is answered: the one that was sampled for, or a retry of it."""
    turn: Turn
    model: str
    """The model's name in answers."""
    token_text: Callable[[int], str]
    """The text of one id."""
    top_logprobs: TopLogprobs | None = None
    """Alternatives to the output tokens. They are not stored: the answer to a retry has none."""
    is_guarded: bool = False
    """The engine runs a repeat guard; the answer says, beyond its dialect, whether that ended the turn."""


def reply_message(parsed: ParsedOutput, call_id_prefix: str) -> Json:
    """The assistant message for a parsed output; tool call ids are `call_id_prefix` and a number."""
    message: Json = {"role": "assistant", "content": parsed.content or (None if parsed.tool_calls else "")}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        message["tool_calls"] = [
            {
                "id": f"{call_id_prefix}{i}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for i, call in enumerate(parsed.tool_calls)
        ]
    return message

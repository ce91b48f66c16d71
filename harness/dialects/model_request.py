"""A model call in the one form that all dialects share: what was asked, and what there is to answer.

A dialect reads a `ModelRequest` from a body and writes its answer from a `ModelAnswer`; everything between the two
knows neither JSON nor route of any dialect. Messages and tools have the form of OpenAI's chat completions, in one
spelling: a history that a client sends back, through whichever dialect, is compared with what was recorded in it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Self, overload

from harness.dialects.request_limits import RequestLimits
from harness.errors import MalformedRequest, OverLimit
from harness.tokens.history import NOTHING_RECALLED, Recall
from harness.tokens.parsing import Delta, ParsedOutput
from harness.tokens.sent_body import SentBody
from harness.types import Json, Message, SamplingWishes, TopLogprobs, Turn

_SEAL = "harness."
_NAMES_SHOWN = 8
_NAME_SHOWN = 64  # characters


class ToolMode(StrEnum):
    """How far the model is free to call tools."""

    AUTO = "auto"
    """The model decides."""
    NONE = "none"
    """Calls are not parsed; the output is content."""
    REQUIRED = "required"
    """The answer begins as a call."""


def _knows_no_answer(response_id: str) -> Sequence[Turn]:
    del response_id
    return ()


def _knows_no_turn(some_id: str) -> Turn | None:
    del some_id
    return None


@dataclass(frozen=True, slots=True)
class WireCall:
    """A model call as it came."""

    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    """With lower-case names."""
    query: Mapping[str, str] = field(default_factory=dict)
    turns_until: Callable[[str], Sequence[Turn]] = _knows_no_answer
    """The turns of its session from the root up to the one that was answered under a response id; none when there is no
    such answer."""
    caller: Callable[[str], Turn | None] = _knows_no_turn
    """The turn of its session that made the tool call with an id: a dialect undoes with it what a client has made of
    the call."""
    answered_as: Callable[[str], Turn | None] = _knows_no_turn
    """The turn of its session that was answered under a response id."""
    sent: SentBody | None = None
    """The body, for a history that is to know by its beginning which messages are in it."""


@dataclass(slots=True)
class RecordedText:
    """Text that a request names in its session's record instead of sending it: at most as much as a body may hold.

    A key is short and the text behind it is long. So the text is counted as it is taken, before it is joined or parsed.
    """

    call: WireCall
    limits: RequestLimits
    characters: int = 0
    """Taken so far, or in the messages before."""

    def take(self, text: str, param: str) -> str:
        """`text`, which the request holds from now on. Raises `OverLimit` when the request holds too much."""
        self.characters += len(text)
        if self.characters > self.limits.body_bytes:
            raise OverLimit(
                f"{param}: expected at most {self.limits.body_bytes} characters (the server's limit `body_bytes`) where"
                " reasoning, calls and items are named instead of sent; got more",
                limit="body_bytes",
                param=param,
            )
        return text

    def unseal(self, sealed: str, taken: set[str], param: str) -> str:
        """The reasoning of the session's own reply for which `seal` gave that; empty when there is no such reply.

        One message holds it once: a key in `taken` stands for nothing. Raises `OverLimit`.
        """
        turn = self.call.answered_as(sealed.removeprefix(_SEAL)) if sealed.startswith(_SEAL) else None
        if turn is None or sealed in taken:
            return ""
        taken.add(sealed)
        return self.take(turn.reply.get("reasoning_content") or "", param)


def seal(response_id: str) -> str:
    """What goes out beside the reasoning of a reply: clients keep it where they drop the text.

    It is a key and holds no text: another session can make nothing of it.
    """
    return _SEAL + response_id


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
    notes: Mapping[str, Any] = field(default_factory=dict)
    """What a reader of the record should know of the request: what was ignored, normalized or left out."""
    template_variables: Json = field(default_factory=dict)
    """Variables of the chat template that it wants set."""
    ignored: Sequence[str] = ()
    """The fields of the body that are not served (`dialects.ignored`)."""


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
            if numbers.step == 1 and numbers.start >= self._known:
                return self._new[numbers.start - self._known : max(0, numbers.stop - self._known)]
            return tuple(self[number] for number in numbers)
        return self._new[numbers - self._known] if numbers >= self._known else self._read(numbers)


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What is known of an answer before there is one: enough to begin its stream, and to keep that alive."""

    request: ModelRequest
    response_id: str
    """32 hex digits; that of an earlier call whose answer is asked for again. A dialect may put a word before it."""
    model: str
    """The model's name in answers."""
    created_at: float
    """Unix seconds."""


class Said(NamedTuple):
    """How much of an answer its stream has said before all of it was known, in characters."""

    reasoning: int = 0
    content: int = 0

    def after(self, delta: Delta) -> Self:
        """The same once `delta` has gone out, too."""
        return self._replace(reasoning=self.reasoning + len(delta.reasoning), content=self.content + len(delta.content))


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

    @property
    def response_id(self) -> str:
        """The id of the answer: that of the call which has had it sampled last; 32 hex digits."""
        turn = self.turn
        known: str | None = turn.notes.get("response_id")
        return known or (turn.segments[-1].request_id if turn.segments else turn.request_digest)


def function_tool(
    name: str, description: str | None, parameters: Mapping[str, Any] | None, strict: bool | None = None
) -> Json:
    """A tool in the normal form, with what is stated, in OpenAI's order: the model sees what it was trained on."""
    stated = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": {field: value for field, value in stated.items() if value is not None}}


def require_offered(name: str, tools: Sequence[Json]) -> None:
    """Raises `MalformedRequest` when a `tool_choice` demands a tool that is not among `tools`."""
    names = [tool["function"]["name"] for tool in tools]
    if name not in names:
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        offered = ", ".join(map(_quote, names[:_NAMES_SHOWN])) + more or "no tools"
        raise MalformedRequest(f"tool_choice: expected one of {offered}, got {_quote(name)}", param="tool_choice")


def _quote(name: str) -> str:
    return repr(name if len(name) <= _NAME_SHOWN else f"{name[:_NAME_SHOWN]}…")


def check_calls(read: Iterable[tuple[str, Message]]) -> None:
    """Raises `MalformedRequest` for two calls of one message with one id.

    `read` has the messages of a request that were read, each behind its field. A result may be there without its call:
    clients that parse calls out of text have none to send.
    """
    for field_name, message in read:
        calls = message.get("tool_calls") or () if message["role"] == "assistant" else ()
        if any(call_id and times > 1 for call_id, times in Counter(call["id"] for call in calls).items()):
            raise MalformedRequest(f"{field_name}: expected an id of its own for each call", param=field_name)


def said_arguments(text: str | None) -> str:
    """The JSON arguments of a call that a client sends back; of those that say nothing, an empty object."""
    return "{}" if (text or "").strip() in ("", "null") else text or ""


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

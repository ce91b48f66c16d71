"""A model call and its answer in the normal form that all dialects share.

Dialects read a `ModelRequest` and write a `ModelAnswer`; code between the two knows no dialect's JSON or routes.
Messages and tools have the form of OpenAI chat completions, in one spelling, so that a history sent back through any
dialect can be compared with the record.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, Self, TypeVar, overload

import msgspec
from msgspec.structs import replace

from harness.decoding import json_decoder
from harness.dialects.json_values import check_json, decode_json
from harness.dialects.request_limits import RequestLimits
from harness.dialects.sse import MEDIA_TYPE
from harness.errors import MalformedRequest, OverLimit
from harness.tokens.history import NOTHING_RECALLED, Recall
from harness.tokens.matching import same_arguments
from harness.tokens.parsing import Delta, ParsedOutput
from harness.tokens.sent_body import SentBody
from harness.top_logprobs import TopLogprobs
from harness.types import Json, Message, Paced, SamplingWishes, Turn, TurnNotes

_T = TypeVar("_T")

_SEAL = "harness."
_NAMES_SHOWN = 8
_NAME_SHOWN = 64  # characters
_NO_ARGUMENTS = (b"{}", b"null", b'""', b'" "')

_object_decoder = json_decoder(dict[str, Any])


class ToolMode(StrEnum):
    AUTO = "auto"
    NONE = "none"
    """Tool calls are not parsed; the output is content."""
    REQUIRED = "required"
    """The answer begins as a tool call."""


class WireCall(msgspec.Struct, frozen=True):
    body: bytes
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Headers by lower-case name."""
    query: Mapping[str, str] = msgspec.field(default_factory=dict)
    path: str = ""
    """Path of the request, the base URL included."""
    turns_until: Callable[[str], Sequence[Turn]] = lambda _: ()
    """Turns of the session from the root to the answer with a response id; empty if there is none."""
    caller: Callable[[str], Turn | None] = lambda _: None
    """Turn that made the tool call with an id. Dialects use it to undo a client's changes."""
    answered_as: Callable[[str], Turn | None] = lambda _: None
    """Turn that was answered under a response id."""
    sent: SentBody | None = None
    """The body, if the history should recognize its first bytes."""
    paced: Paced = iter


@dataclass(slots=True)
class RecordedText:
    """Recorded text that a request references instead of sending: at most as much as a body may hold.

    A reference is short and its text long, so text is counted before it is joined or parsed.
    """

    call: WireCall
    limits: RequestLimits
    characters: int = 0
    """Characters taken so far, including earlier messages."""

    def take(self, text: str, param: str) -> str:
        """Count `text` and return it. Raises `OverLimit`."""
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
        """Return the reasoning of the reply that `seal` gave this key, or an empty text. Raises `OverLimit`."""
        turn = self.sealed_turn(sealed)
        # One message holds the reasoning once.
        if turn is None or sealed in taken:
            return ""
        taken.add(sealed)
        return self.take(turn.reply.get("reasoning_content") or "", param)

    def sealed_turn(self, sealed: str) -> Turn | None:
        """Return the turn whose reply has this key (`seal`)."""
        return self.call.answered_as(sealed.removeprefix(_SEAL)) if sealed.startswith(_SEAL) else None

    def spell_arguments(self, call_id: str, sent: msgspec.Raw, param: str) -> str:
        """Return the arguments of a call sent as an object: as sampled if an equal call is recorded, else as usual."""
        if bytes(sent) in _NO_ARGUMENTS:
            return "{}"
        value = decode_json(_object_decoder, sent, param)
        turn = self.call.caller(call_id)
        for made in () if turn is None else turn.reply["tool_calls"]:
            if made["id"] == call_id:
                arguments = self.take(made["function"]["arguments"], param)
                if same_arguments(arguments, bytes(sent).decode()):
                    return arguments
        check_json(value, param, self.limits.json_depth)
        return json.dumps(value, ensure_ascii=False)


def seal(response_id: str) -> str:
    """Return the key sent with a reply's reasoning. It holds no text, so another session cannot use it."""
    return _SEAL + response_id


class Streaming(msgspec.Struct, frozen=True):
    wants_usage: bool
    media_type: str = MEDIA_TYPE


class ModelRequest(msgspec.Struct, frozen=True):
    dialect: str
    messages: Sequence[Message]
    """Messages; known ones may be read lazily. A slice is a tuple."""
    tools: tuple[Json, ...]
    tool_mode: ToolMode
    tool_name: str | None
    """Function that REQUIRED names; None for any."""
    sampling: SamplingWishes
    wants_logprobs: bool
    model: str
    wants_reasoning: bool = True
    """False if the answer leaves the reasoning out; its key (`seal`) is there."""
    streaming: Streaming | None = None
    """None for a whole answer."""
    recall: Recall = NOTHING_RECALLED
    """Parts of the request recognized by their bytes."""
    notes: TurnNotes = TurnNotes()
    """Fields ignored, normalized or left out, for readers of the record."""
    template_variables: Json = msgspec.field(default_factory=dict)
    effort: tuple[str, str] | None = None
    """Field and value of a reasoning effort, among the ignored fields: a template variable if the template reads it."""
    ignored: Sequence[str] = ()
    """Body fields that are not served (`dialects.ignored`)."""

    def without_ignored(self, field: str) -> Self:
        """Return this request with `field` served."""
        noted = {name: value for name, value in self.notes.ignored.items() if name != field}
        ignored = tuple(name for name in self.ignored if name != field)
        return replace(self, ignored=ignored, notes=replace(self.notes, ignored=noted))


class PartlyRead(Sequence[_T]):
    """Messages of which `read` reads the first `known` on demand."""

    def __init__(self, known: int, new: tuple[_T, ...], read: Callable[[int], _T]) -> None:
        self._known = known
        self._new = new
        self._read = read

    def with_first(self, change: Callable[[_T], _T]) -> Self:
        """Return these messages, with the first one changed on access."""
        read = self._read
        return type(self)(self._known, self._new, lambda at: read(at) if at else change(read(at)))

    def __len__(self) -> int:
        return self._known + len(self._new)

    @overload
    def __getitem__(self, index: int) -> _T: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[_T, ...]: ...

    def __getitem__(self, index: int | slice) -> _T | tuple[_T, ...]:
        numbers = range(len(self))[index]
        if isinstance(numbers, range):
            if numbers.step == 1 and numbers.start >= self._known:
                return self._new[numbers.start - self._known : max(0, numbers.stop - self._known)]
            return tuple(self[number] for number in numbers)
        return self._new[numbers - self._known] if numbers >= self._known else self._read(numbers)


def read_in_units(
    recall: Recall, new: Sequence[Sequence[Message]], read_unit: Callable[[int], Sequence[Message]]
) -> Sequence[Message]:
    """Return the messages of a request whose raw messages are read as one or several: those known, then the `new`."""
    flat = tuple(message for messages in new for message in messages)
    if not recall.known:
        return flat
    starts = [0, *accumulate(recall.counts)]
    read_again = lru_cache(maxsize=1)(read_unit)  # messages are asked for in order, and many may come from one unit

    def read_known(number: int) -> Message:
        unit = bisect_right(starts, number) - 1
        return read_again(unit)[number - starts[unit]]

    return PartlyRead(recall.known, flat, read_known)


class AnswerHead(msgspec.Struct, frozen=True):
    """Facts known before the answer, enough to begin its stream and keep it alive."""

    request: ModelRequest
    response_id: str
    """32 hex digits, which a dialect may prefix. A retry keeps the id of the call it repeats."""
    model: str
    created_at: float
    """Unix seconds."""


class Said(NamedTuple):
    """Characters of an answer already streamed."""

    reasoning: int = 0
    content: int = 0

    def after(self, delta: Delta) -> Self:
        return self._replace(reasoning=self.reasoning + len(delta.reasoning), content=self.content + len(delta.content))


class ModelAnswer(msgspec.Struct, frozen=True):
    """A recorded turn and the other contents of its answer."""

    request: ModelRequest
    """Request to answer: the sampled one or a retry of it."""
    turn: Turn
    model: str
    token_text: Callable[[int], str]
    top_logprobs: TopLogprobs | None = None
    """Alternatives to the output tokens. Not stored, so a retry's answer has none."""
    is_guarded: bool = False
    """True if the engine runs a repeat guard. The answer then reports whether it ended the turn."""

    @property
    def response_id(self) -> str:
        """32 hex digits: the id of the last call that sampled the answer."""
        turn = self.turn
        return turn.notes.response_id or (turn.segments[-1].request_id if turn.segments else turn.request_digest)


def function_tool(
    name: str, description: str | None, parameters: Mapping[str, Any] | None, strict: bool | None = None
) -> Json:
    # OpenAI's order: a template that writes tools as JSON shows the model what it was trained on.
    stated = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": {field: value for field, value in stated.items() if value is not None}}


def require_offered(name: str, tools: Sequence[Json], param: str = "tool_choice") -> None:
    """Raise `MalformedRequest` for the field `param` if `name` is not among `tools`."""
    names = [tool["function"]["name"] for tool in tools]
    if name not in names:
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        offered = ", ".join(map(_quote, names[:_NAMES_SHOWN])) + more or "no tools"
        raise MalformedRequest(f"{param}: expected one of {offered}, got {_quote(name)}", param=param)


def _quote(name: str) -> str:
    return repr(name if len(name) <= _NAME_SHOWN else f"{name[:_NAME_SHOWN]}…")


def check_calls(read: Iterable[tuple[str, Message]]) -> None:
    """Raise `MalformedRequest` if two calls of one message share an id.

    `read` yields fields and their messages. A result without its call is valid: clients that parse calls out of text
    have none to send.
    """
    for field_name, message in read:
        calls = message.get("tool_calls") or () if message["role"] == "assistant" else ()
        ids = [call["id"] for call in calls if call["id"]]
        if len(set(ids)) < len(ids):
            raise MalformedRequest(f"{field_name}: expected a unique id for each call", param=field_name)


def said_arguments(text: str | None) -> str:
    """Return the JSON arguments of a call that a client sends back; `{}` for blank or null."""
    return "{}" if (text or "").strip() in ("", "null") else text or ""


def reply_message(parsed: ParsedOutput, call_id_prefix: str) -> Json:
    """Return the assistant message of a parsed output. Call ids are `call_id_prefix` and a number."""
    message: Json = {"role": "assistant", "content": parsed.content or (None if parsed.tool_calls else "")}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        message["tool_calls"] = [call.to_json(f"{call_id_prefix}{i}") for i, call in enumerate(parsed.tool_calls)]
    return message

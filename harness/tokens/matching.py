"""Recognition of a history that a client sends back, by one chained key per message.

The digest of a prefix covers the tools and every message. Looking digests up finds the deepest stored turn that a
request extends. `NormalForm.contradiction` then compares the candidates with the request. Under `exact` a digest
decides alone. On a match the stored tokens stay, whatever spelling the client sent.
"""

import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from hashlib import blake2b
from math import isinf
from typing import NamedTuple

import msgspec

from harness.errors import MalformedRequest
from harness.types import Json, Message, refuse_constant, unique_keys

ChainKey = bytes
"""Digest (blake2b-128) of a conversation prefix."""

_Step = Callable[[Message], Json]
_TEXTS = frozenset({"content", "reasoning_content"})
_COMPARED = _TEXTS | {"tool_calls", "name"}  # in replies, field by field; the digest covers less of them
_OUR_ID = re.compile(r"call_[0-9a-f]{12}[0-9]+_[0-9]+")
_TOLD_CALL = re.compile(
    rf"""\{{["']id["']: *["']({_OUR_ID.pattern})["'], *["']type["']: *["']function["'], *["']function["']: *\{{"""
)
_PIECE = re.compile(r"""[\[{]|[\]}]|'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+"|[^\[\]{}'"]++""", re.DOTALL)

_DEEPEST = 100  # levels of arguments; deeper ones are compared as text, at any depth of the stack

_encoder = msgspec.json.Encoder(order="deterministic")


class Matching(StrEnum):
    """Ways to compare a history that a client sends back, in addition to the default (`NormalForm`)."""

    EXACT = "exact"
    """Everything counts, to the letter. An empty value equals a missing one."""
    TRIMMED = "trimmed"
    """White space at the ends of texts does not count."""
    CALL_IDS = "call_ids"
    """Only the call ids of an assistant message count, if all are ours. They are unique in a session.

    Calls written as text, in a list of objects on the last line, are recognized by the same ids.
    """
    STRICT = "strict"
    """Deprecated: the same as EXACT."""
    LOOSE_TOOL_CALLS = "loose_tool_calls"
    """Deprecated, covered by the default: JSON arguments are equal by value and type (`1`, `1.0` and `true` differ)."""
    JSON_NUMBERS = "json_numbers"
    """Deprecated, covered by the default: the same, but `1` equals `1.0`."""
    IGNORE_REASONING = "ignore_reasoning"
    """Deprecated: by default a client may drop `reasoning_content`. With this, other reasoning matches, too."""


OFFERED = (Matching.EXACT, Matching.TRIMMED, Matching.CALL_IDS, "/REGEX/")


class Contradiction(NamedTuple):
    field: str
    recorded: object
    sent: object


class NormalForm:
    """Parts of a message that count in a comparison.

    By default, for an assistant message: functions and JSON arguments of its calls, call ids that are ours, content
    without line breaks at the end, reasoning, and name. A client may omit reasoning, and content next to calls. A name
    may be on one side only. In other messages everything counts. `steps` remove more, beforehand. Raises
    `MalformedRequest` if a custom function fails.
    """

    def __init__(self, steps: Sequence[_Step] = (), *, is_exact: bool = False) -> None:
        self._steps = steps
        self.has_steps = bool(steps)
        self.is_exact = is_exact

    def __call__(self, message: Message) -> Json:
        """Return the part of `message` that its digest covers."""
        form = self._prepare(message)
        return form if self.is_exact or form.get("role") != "assistant" else _form_reply(form)

    def contradiction(self, recorded: Message, sent: Message) -> Contradiction | None:
        """Return the first field in which `sent` contradicts `recorded`."""
        ours, theirs = self._prepare(recorded), self._prepare(sent)
        if ours == theirs and not self._steps:  # without steps all are texts; to Python, 1 equals true
            return None
        are_replies = not self.is_exact and ours.get("role") == theirs.get("role") == "assistant"
        differs = _contradicts if are_replies else _differs
        field = next((name for name in dict.fromkeys((*ours, *theirs)) if differs(name, ours, theirs)), None)
        return None if field is None else Contradiction(field, ours.get(field), theirs.get(field))

    def _prepare(self, message: Message) -> Json:
        form = {name: value for name, value in message.items() if value not in (None, "", [])}
        for step in self._steps:
            form = step(form)
        return form


EXACT = NormalForm(is_exact=True)


def normal_form(matching: Sequence[str]) -> NormalForm:
    """Return the form for `Matching` values, `/REGEX/` and `package.module:function` paths, applied in order.

    What a regex finds in a message does not count, unless the model said it. A function takes a message without empty
    values and returns the part to compare, as JSON. Raises `MalformedRequest` for any other name.
    """
    others = [name for name in matching if name not in (Matching.EXACT, Matching.STRICT)]
    return NormalForm(list(map(_step, others)), is_exact=len(others) < len(matching))


def chain_keys(messages: Sequence[Message], tools: Sequence[Json], form: NormalForm = EXACT) -> list[ChainKey]:
    """Return the digests of all prefixes. Element i covers the tools and the first i messages."""
    keys = [_digest(b"", tools)]
    for message in messages:
        keys.append(next_key(keys[-1], message, form))
    return keys


def next_key(key: ChainKey, message: Message, form: NormalForm = EXACT) -> ChainKey:
    return _digest(key, form(message))


def same_arguments(left: str, right: str) -> bool:
    """Return True if tool arguments are equal to a client with only one kind of number."""
    return left == right or _encoder.encode(_number_value(left)) == _encoder.encode(_number_value(right))


def _step(name: str) -> _Step:
    if name in _STEPS:
        return _STEPS[Matching(name)]
    if name.startswith("/") and name.endswith("/"):
        try:
            return partial(_leave_out, re.compile(name[1:-1]))
        except (re.error, OverflowError, RecursionError) as error:
            raise MalformedRequest(
                f"matching: {name:.80} is no regular expression: {error}", param="matching"
            ) from error
    module, separator, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function) if separator else None
    except (ImportError, AttributeError, ValueError) as error:
        raise MalformedRequest(f"matching: cannot load {name!r}: {error}", param="matching") from error
    if not callable(found):
        known = ", ".join(OFFERED)
        raise MalformedRequest(
            f"matching: expected one of {known}, or package.module:function; got {name!r}", param="matching"
        )

    def apply(message: Message) -> Json:
        try:
            form = found(message)
            _encoder.encode(form)
        except Exception as error:
            raise MalformedRequest(f"matching: {name} failed on a message: {error!r}", param="matching") from error
        return form if isinstance(form, dict) else {"form": form}

    return apply


def _loosen_tool_calls(message: Message, value_of: Callable[[object], object]) -> Json:
    formed: Json = dict(message)
    if message.get("tool_calls"):
        formed["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": value_of(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    return formed


def _trim(message: Message) -> Json:
    trimmed = {name: value.strip() if name in _TEXTS else value for name, value in message.items()}
    return {name: value for name, value in trimmed.items() if value != ""}


def _leave_out(noise: re.Pattern[str], message: Message) -> Json:
    content = message.get("content")
    if message["role"] == "assistant" or not isinstance(content, str):
        return dict(message)
    return {**message, "content": noise.sub("", content)}


def _keep_call_ids(message: Message) -> Json:
    calls, content = message.get("tool_calls"), message.get("content")
    ids = [str(call.get("id")) for call in calls or ()]
    if not calls and message["role"] == "assistant" and isinstance(content, str):
        ids = _told_ids(content)
    return {"role": message["role"], "call_ids": ids} if ids and all(map(_OUR_ID.fullmatch, ids)) else dict(message)


def _told_ids(text: str) -> list[str]:
    line = text.rstrip()
    line = line[line.rfind("\n") + 1 :]
    if not line.startswith("[") or not line.endswith("]"):
        return []
    ids: list[str] = []
    depth = end = 0
    for piece in _PIECE.finditer(line):
        if piece.start() != end or (end and not depth):  # an unterminated string, or text after the list
            return []
        end = piece.end()
        if depth == 1 and (call := _TOLD_CALL.match(line, piece.start())) is not None:
            ids.append(call[1])
        elif depth == 1 and piece[0] not in ("]", ", ", ","):
            return []
        depth += (piece[0] in "[{") - (piece[0] in "]}")
    return ids if not depth and end == len(line) else []


def _form_reply(form: Json) -> Json:
    # The part that every client sends back. One that omits the rest does not contradict the record.
    reply = {name: value for name, value in form.items() if name not in _COMPARED}
    if calls := form.get("tool_calls"):
        reply["tool_calls"] = _form_calls(calls)
    elif content := _without_end(form.get("content")):
        reply["content"] = content
    return reply


def _differs(name: str, ours: Json, theirs: Json) -> bool:
    return _encoder.encode(ours.get(name)) != _encoder.encode(theirs.get(name))


def _contradicts(name: str, ours: Json, theirs: Json) -> bool:
    was, said = ours.get(name), theirs.get(name)
    match name:
        case "reasoning_content":
            return _trimmed(said) not in ("", _trimmed(was))
        case "content":
            return _without_end(said) != _without_end(was) and not (theirs.get("tool_calls") and not _without_end(said))
        case "tool_calls":
            if not _differs(name, ours, theirs):
                return False
            are_same = _encoder.encode(_form_calls(was)) == _encoder.encode(_form_calls(said))
            return not are_same or not all(map(_may_be, _ids(was), _ids(said)))
        case "name":  # agent frameworks add the name of a speaker, which the model did not sample
            return None not in (was, said) and was != said
        case _:
            return _differs(name, ours, theirs)


def _may_be(recorded_id: str, sent_id: str) -> bool:
    # An id of ours stands only for itself. Clients may replace ids by their own.
    return sent_id == recorded_id or not _OUR_ID.fullmatch(sent_id)


def _form_calls(calls: object) -> object:
    return [_form_call(call) for call in calls] if isinstance(calls, list | tuple) else calls


def _form_call(call: object) -> object:
    match call:
        case {"function": {"name": name, "arguments": arguments}}:
            return [name, _number_value(arguments)]
        case _:
            return call


def _ids(calls: object) -> list[str]:
    each = calls if isinstance(calls, list | tuple) else ()
    return [str(call.get("id")) if isinstance(call, dict) else "" for call in each]


def _without_end(text: object) -> object:
    return text.rstrip("\n") if isinstance(text, str) else text or ""


def _trimmed(text: object) -> object:
    return text.strip() if isinstance(text, str) else text or ""


def _argument_value(text: object, number: Callable[[float], float] = lambda value: value) -> object:
    try:  # a custom function may have decoded it already
        value = _argument_decoder.decode(text.strip() or "{}") if isinstance(text, str) else text
        value = _convert(value, number, _DEEPEST)
        _encoder.encode(value)
    except (ValueError, OverflowError, RecursionError):
        # Repeated keys, NaN, numbers beyond all floats, lone surrogates: parsers differ on these, or cannot write them.
        return text
    return value


def _number_value(text: object) -> object:
    value = _argument_value(text, _as_float)  # `1` and `1.0` are one number to JavaScript
    if value is None:
        return {}
    return text if isinstance(value, str) else value


def _finite(text: str) -> float:
    value = float(text)
    if isinf(value):
        raise ValueError(f"{text} is more than a float holds")
    return value


def _as_float(value: float) -> float:
    return float(value) + 0.0  # clients send -0.0 back as 0


def _convert(value: object, number: Callable[[float], float], levels: int) -> object:
    if not levels:
        raise ValueError("nested too deeply")
    if isinstance(value, dict):
        return {key: _convert(each, number, levels - 1) for key, each in value.items()}
    if isinstance(value, list):
        return [_convert(each, number, levels - 1) for each in value]
    return number(value) if type(value) is int or type(value) is float else value  # a bool is no number


_argument_decoder = json.JSONDecoder(object_pairs_hook=unique_keys, parse_constant=refuse_constant, parse_float=_finite)

_STEPS: Mapping[Matching, _Step] = {
    Matching.LOOSE_TOOL_CALLS: partial(_loosen_tool_calls, value_of=_argument_value),
    Matching.JSON_NUMBERS: partial(_loosen_tool_calls, value_of=_number_value),
    Matching.IGNORE_REASONING: lambda message: {
        name: value for name, value in message.items() if name != "reasoning_content"
    },
    Matching.TRIMMED: _trim,
    Matching.CALL_IDS: _keep_call_ids,
}


def _digest(key: bytes, value: object) -> ChainKey:
    return blake2b(key + _encoder.encode(value), digest_size=16).digest()

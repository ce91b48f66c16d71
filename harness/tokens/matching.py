"""Recognizing a history that a client sends back: one key per message, chained.

`chain_keys` gives for each prefix of a conversation a digest that depends on every message (and the tools) in it, so
the deepest stored turn that a request extends is found by looking up digests, not by comparing messages. Two messages
are the same exactly when their normal forms are equal. Differences that every client makes (None against an empty text,
unknown extra fields) never count; what else does not is the session's choice: `normal_form`.

On a match the stored tokens stay, whatever spelling the client sent: only the decision is made here.
"""

import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from hashlib import blake2b
from math import isinf

import msgspec

from harness.errors import MalformedRequest
from harness.types import Json, Message, refuse_constant

ChainKey = bytes
"""blake2b-128 over a conversation prefix."""

NormalForm = Callable[[Message], Json]
"""The part of a message that counts when histories are compared; must be JSON."""

_TEXTS = frozenset({"content", "reasoning_content"})
_OUR_ID = re.compile(r"call_[0-9a-f]{12}[0-9]+_[0-9]+")
_TOLD_CALL = re.compile(
    rf"""\{{["']id["']: *["']({_OUR_ID.pattern})["'], *["']type["']: *["']function["'], *["']function["']: *\{{"""
)
"""The beginning of a call of ours as a JSON object, or as a Python one."""
_PIECE = re.compile(r"""[\[{]|[\]}]|'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+"|[^\[\]{}'"]++""", re.DOTALL)
"""A bracket, a string, or what stands between them, of JSON and of Python alike."""

_encoder = msgspec.json.Encoder(order="deterministic")


class Matching(StrEnum):
    """Differences between a stored message and the one a client sends back that do not count."""

    STRICT = "strict"
    """Nothing."""
    LOOSE_TOOL_CALLS = "loose_tool_calls"
    """The spelling of tool arguments: equal JSON is equal, types told apart (`1`, `1.0`, `true`)."""
    JSON_NUMBERS = "json_numbers"
    """The same, and the spelling of numbers in them: `1` is `1.0`, `1e3` is `1000`, as in JavaScript."""
    IGNORE_REASONING = "ignore_reasoning"
    """`reasoning_content`, which many clients drop."""
    TRIMMED = "trimmed"
    """White space at the ends of texts."""
    CALL_IDS = "call_ids"
    """Everything of an assistant message with tool calls but their ids, where all are ours: unique in a session.

    A client that tells the calls as text, in a list of objects that is the last line, is known by the same ids.
    """


def normal_form(matching: Sequence[str]) -> NormalForm:
    """The normal form for a combination of `Matching` values and `package.module:function` paths, applied in order.

    A function takes a message and returns what of it counts, as JSON. Raises `MalformedRequest` when a name is neither.
    """
    steps = [_step(name) for name in matching]

    def apply(message: Message) -> Json:
        form = {name: value for name, value in message.items() if value not in (None, "", [])}
        for step in steps:
            form = step(form)
        return form

    return apply


STRICT = normal_form(())


def chain_keys(messages: Sequence[Message], tools: Sequence[Json], form: NormalForm = STRICT) -> list[ChainKey]:
    """Digests of all prefixes: element i covers the tools and the first i messages; length is `len(messages) + 1`."""
    keys = [_digest(b"", tools)]
    for message in messages:
        keys.append(next_key(keys[-1], message, form))
    return keys


def next_key(key: ChainKey, message: Message, form: NormalForm = STRICT) -> ChainKey:
    """The digest of the prefix `key` stands for with `message` appended."""
    return _digest(key, form(message))


def same_arguments(left: str, right: str) -> bool:
    """Whether two JSON texts of tool arguments say the same to a client that knows one kind of numbers."""
    return left == right or _encoder.encode(_number_value(left)) == _encoder.encode(_number_value(right))


def _step(name: str) -> NormalForm:
    """The step called `name`; of a function whatever it does wrong is an error of the session's matching."""
    if name in _STEPS:
        return _STEPS[Matching(name)]
    module, separator, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function) if separator else None
    except (ImportError, AttributeError, ValueError) as error:
        raise MalformedRequest(f"matching: cannot load {name!r}: {error}", param="matching") from error
    if not callable(found):
        known = ", ".join(Matching)
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


def _keep_call_ids(message: Message) -> Json:
    calls, content = message.get("tool_calls"), message.get("content")
    ids = [str(call.get("id")) for call in calls or ()]
    if not calls and message["role"] == "assistant" and isinstance(content, str):
        ids = _told_ids(content)
    return {"role": message["role"], "call_ids": ids} if ids and all(map(_OUR_ID.fullmatch, ids)) else dict(message)


def _told_ids(text: str) -> list[str]:
    """The ids of the calls that a text announces: its last line is a list of them, and of nothing else."""
    line = text.rstrip()
    line = line[line.rfind("\n") + 1 :]
    if not line.startswith("[") or not line.endswith("]"):
        return []
    ids: list[str] = []
    depth = end = 0
    for piece in _PIECE.finditer(line):
        if piece.start() != end or (end and not depth):  # a string without an end; behind the list
            return []
        end = piece.end()
        if depth == 1 and (call := _TOLD_CALL.match(line, piece.start())) is not None:
            ids.append(call[1])
        elif depth == 1 and piece[0] not in ("]", ", ", ","):
            return []
        depth += (piece[0] in "[{") - (piece[0] in "]}")
    return ids if not depth and end == len(line) else []


def _argument_value(text: object) -> object:
    """The value of JSON arguments, the text itself when it is not plain JSON.

    Repeated keys, NaN, numbers beyond all floats, half a surrogate pair: what parsers differ on, or cannot write.
    """
    if not isinstance(text, str):  # the value already
        return text
    try:
        value: object = json.loads(
            text or "{}", object_pairs_hook=_unique_keys, parse_constant=refuse_constant, parse_float=_finite
        )
        _encoder.encode(value)
    except (ValueError, RecursionError):
        return text
    return value


def _number_value(text: object) -> object:
    """The same with all numbers as floats: `1` and `1.0` are one number to JavaScript, `1e3` is `1000`."""
    value = _argument_value(text)
    try:
        return text if isinstance(value, str) else _as_floats(value)
    except (OverflowError, RecursionError):
        return text


def _finite(text: str) -> float:
    value = float(text)
    if isinf(value):
        raise ValueError(f"{text} is more than a float holds")
    return value


def _as_floats(value: object) -> object:
    if isinstance(value, dict):
        return {key: _as_floats(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_as_floats(each) for each in value]
    return float(value) if type(value) is int else value


def _unique_keys(pairs: list[tuple[str, object]]) -> Json:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key is repeated")
    return dict(pairs)


_STEPS: Mapping[Matching, NormalForm] = {
    Matching.STRICT: dict,
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

"""The tools of OpenAI Responses as functions for any model, and its calls as the client knows them.

A tool that a client runs becomes a function with JSON arguments, and its calls return as their original kind
(`CallForm`): a custom tool, whose input is free text, becomes a function with one string; tools of a namespace get its
name as prefix. Tools that only the vendor can run are not offered. The form alone decides a call's appearance in both
directions, so that a call sent back equals the recorded one.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from harness.decoding import json_decoder
from harness.dialects.json_values import check_json, decode_json
from harness.dialects.model_request import function_tool
from harness.dialects.request_limits import RequestLimits, utf8_bytes
from harness.errors import MalformedRequest
from harness.types import Json

FUNCTION, CUSTOM, LOCAL_SHELL = CALL_KINDS = ("function", "custom", "local_shell")
"""Kinds of tools that a client runs."""

_INPUT = "input"
# Suffix of a call's id: the model gave a custom tool other arguments than one text.
_AS_IT_IS = "_json"

_LOCAL_SHELL_PARAMETERS: Json = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
        "env": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "required": ["command"],
}


class CallForm(NamedTuple):
    """A function's calls as the client sees them."""

    kind: str
    """FUNCTION, CUSTOM or LOCAL_SHELL."""
    name: str
    namespace: str | None = None

    @property
    def function(self) -> str:
        """Name that the model sees."""
        return self.name if self.namespace is None else f"{self.namespace}__{self.name}"


class _ToolHead(msgspec.Struct):
    type: str
    name: str = ""
    tools: list[msgspec.Raw] = msgspec.field(default_factory=list)


class _Function(msgspec.Struct):
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _ToolFormat(msgspec.Struct):
    type: str = "text"
    syntax: str = ""
    definition: str = ""


class _Custom(msgspec.Struct):
    description: str | None = None
    format: _ToolFormat = msgspec.field(default_factory=_ToolFormat)


_head_decoder = json_decoder(_ToolHead)
_function_decoder = json_decoder(_Function)
_custom_decoder = json_decoder(_Custom)


class _Offered(NamedTuple):
    form: CallForm
    raw: msgspec.Raw
    field: str


class ToolList:
    """Tools of one request. Reads only kinds and names until `read`.

    Raises `MalformedRequest` for an invalid tool or repeated name, `OverLimit` for too many, including those not
    offered.
    """

    def __init__(self, raws: Sequence[msgspec.Raw], limits: RequestLimits) -> None:
        self._limits = limits
        self._count = self._namespace_bytes = 0
        self._offered: dict[str, _Offered] = {}
        self.left_out: list[str] = []
        """Kinds of tools that are not offered."""
        self._add_all(raws, "tools", None)

    def _add_all(self, raws: Sequence[msgspec.Raw], field: str, namespace: str | None) -> None:
        self._count += len(raws)
        self._limits.require("tools", self._count, field)
        self._namespace_bytes += len(raws) * utf8_bytes(namespace or "")  # each function has it in its name
        self._limits.require("schema_bytes", self._namespace_bytes, field)
        for i, raw in enumerate(raws):
            self._add(raw, f"{field}[{i}]", namespace)

    def _add(self, raw: msgspec.Raw, field: str, namespace: str | None) -> None:
        head = decode_json(_head_decoder, raw, field)
        if head.type == "namespace" and namespace is None:
            self._add_all(head.tools, f"{field}.tools", head.name)
            return
        if head.type not in CALL_KINDS:
            self.left_out.append(head.type)
            return
        name = LOCAL_SHELL if head.type == LOCAL_SHELL else head.name
        form = CallForm(head.type, name, namespace)
        if not name:
            raise MalformedRequest(f"{field}.name: expected the name of the tool, got none", param=f"{field}.name")
        if form.function in self._offered:
            raise MalformedRequest(f"{field}.name: duplicate name", param=f"{field}.name")
        self._offered[form.function] = _Offered(form, raw, field)

    @property
    def names(self) -> Sequence[str]:
        return list(self._offered)

    @property
    def forms(self) -> dict[str, list[str | None]]:
        """Forms, as JSON, of calls that the client does not know by the function's name."""
        forms = ((name, offered.form) for name, offered in self._offered.items())
        return {name: list(form) for name, form in forms if form != CallForm(FUNCTION, name)}

    def read(self) -> tuple[Json, ...]:
        """Return the functions in normal form. Raises `MalformedRequest`, `OverLimit`."""
        size = sum(memoryview(offered.raw).nbytes for offered in self._offered.values())
        self._limits.require("schema_bytes", size, "tools")
        return tuple(_function(offered, self._limits) for offered in self._offered.values())


def _function(offered: _Offered, limits: RequestLimits) -> Json:
    form, raw, field = offered
    if form.kind == FUNCTION:
        function = decode_json(_function_decoder, raw, field)
        check_json(function.parameters, "tools", limits.json_depth)
        return function_tool(form.function, function.description, function.parameters, function.strict)
    if form.kind == LOCAL_SHELL:
        return function_tool(form.function, "Runs a command on the local machine.", _LOCAL_SHELL_PARAMETERS)
    custom = decode_json(_custom_decoder, raw, field)
    wanted = custom.format
    says = f"Text in this {wanted.syntax} grammar:\n{wanted.definition}" if wanted.definition else "Free text."
    properties = {_INPUT: {"type": "string", "description": says}}
    parameters = {"type": "object", "properties": properties, "required": [_INPUT]}
    return function_tool(form.function, custom.description, parameters)


def call_item(call: Json, forms: Mapping[str, Sequence[str | None]], item_id: str) -> Json:
    """Return the output item of a recorded call, given its request's `forms`."""
    function = call["function"]
    kind, name, namespace = forms.get(function["name"], (FUNCTION, function["name"], None))
    within = {} if namespace is None else {"namespace": namespace}
    head: Json = {"call_id": call["id"], "status": "completed"}
    if kind == CUSTOM:
        text = _only_input(function["arguments"])
        if text is None:
            # The suffix makes `custom_arguments` restore the arguments unchanged.
            head["call_id"] += _AS_IT_IS
        said = function["arguments"] if text is None else text
        return {"id": f"ctc_{item_id}", "type": "custom_tool_call", **head, "name": name, "input": said, **within}
    if kind == LOCAL_SHELL:
        action = _shell_action(function["arguments"])
        if action is not None:
            return {"id": f"lsh_{item_id}", "type": "local_shell_call", **head, "action": action}
    said = function["arguments"]
    return {"id": f"fc_{item_id}", "type": "function_call", **head, "name": name, "arguments": said, **within}


def custom_arguments(call_id: str, text: str) -> str:
    """Return the recorded arguments of a custom call that a client sends back."""
    return text if call_id.endswith(_AS_IT_IS) else json.dumps({_INPUT: text}, ensure_ascii=False)


def recorded_id(call_id: str) -> str:
    """Return the recorded id of a call that a client sends back."""
    return call_id.removesuffix(_AS_IT_IS)


def shell_arguments(action: Json) -> str:
    """Return the recorded arguments of a local shell call that a client sends back."""
    said = {name: value for name, value in action.items() if name != "type" and value not in (None, {})}
    return json.dumps(said, ensure_ascii=False)


def _only_input(arguments: str) -> str | None:
    """Return the text of a custom call; None if the arguments would not round-trip."""
    text = _load_object(arguments).get(_INPUT)
    return text if isinstance(text, str) and custom_arguments("", text) == arguments else None


def _shell_action(arguments: str) -> Json | None:
    """Return the action of a local shell call; None if the arguments would not round-trip."""
    value = _load_object(arguments)
    if not isinstance(value.get("command"), list):
        return None
    action = {"type": "exec", **value, "env": value.get("env") or {}}
    return action if isinstance(action["env"], dict) and shell_arguments(action) == arguments else None


def _load_object(arguments: str) -> Json:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}

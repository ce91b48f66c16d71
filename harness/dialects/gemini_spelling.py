"""Spellings of Gemini requests: fields in camelCase or snake_case, schemas of OpenAPI. Clients' names stay."""

import re
from typing import Any

import msgspec

from harness.decoding import json_decoder
from harness.dialects.json_values import decode_json

_MADE_UP = frozenset(
    ("args", "response", "parameters", "parametersJsonSchema", "responseSchema", "responseJsonSchema", "labels")
)
_LEVELS = 8
_COUNTS = frozenset(("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"))

_object_decoder = json_decoder(dict[str, msgspec.Raw])
_list_decoder = json_decoder(list[msgspec.Raw])


def camel(name: str) -> str:
    first, *others = name.split("_")
    return "".join((first, *(each[:1].upper() + each[1:] for each in others))) if first else name


def snake(name: str) -> str:
    return re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", name)


def respell(raw: bytes | msgspec.Raw, levels: int = _LEVELS) -> msgspec.Raw:
    """Return the JSON of a request, or of a part of it, with its field names in camelCase."""
    text = bytes(raw).lstrip()
    formed: Any = msgspec.Raw(text)
    if text[:1] == b"{" and levels:
        fields = ((camel(name), value) for name, value in decode_json(_object_decoder, text).items())
        formed = {name: value if name in _MADE_UP else respell(value, levels - 1) for name, value in fields}
    elif text[:1] == b"[" and levels:
        formed = [respell(each, levels - 1) for each in decode_json(_list_decoder, text)]
    return msgspec.Raw(msgspec.json.encode(formed))


def json_schema(schema: Any) -> Any:
    """Return a schema as JSON Schema: lower-case types, null as a type, numbers as counts, properties in order."""
    if isinstance(schema, list):
        return [json_schema(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    formed: dict[str, Any] = {}
    for name, value in ((camel(name), value) for name, value in schema.items()):
        match value:
            case str() if name == "type":
                formed |= {} if value == "TYPE_UNSPECIFIED" else {"type": value.lower()}
            case str() if name in _COUNTS and value.isdecimal():
                formed[name] = int(value)
            case dict() if name in ("properties", "defs", "$defs"):
                formed[name] = {key: json_schema(each) for key, each in value.items()}
            case _ if name in ("items", "anyOf", "prefixItems", "additionalProperties"):
                formed[name] = json_schema(value)
            case _:
                formed[name] = value
    order, properties = formed.pop("propertyOrdering", None), formed.get("properties")
    if isinstance(order, list) and isinstance(properties, dict):
        first = {name: properties[name] for name in order if isinstance(name, str) and name in properties}
        formed["properties"] = first | properties
    if formed.pop("nullable", None) is True:
        _allow_null(formed)
    return formed


def _allow_null(schema: dict[str, Any]) -> None:
    if "$ref" in schema and "anyOf" not in schema:
        schema["anyOf"] = [{"$ref": schema.pop("$ref")}]
    for name, null in (("type", "null"), ("enum", None), ("anyOf", {"type": "null"})):
        if name in schema:
            allowed = schema[name] if isinstance(schema[name], list) else [schema[name]]
            schema[name] = allowed if null in allowed else [*allowed, null]

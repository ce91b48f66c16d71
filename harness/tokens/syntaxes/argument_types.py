"""Value of an argument that a model wrote as plain text, found with the tool's JSON schema.

A text may have several readings: `20` is a number and a string. The first that the schema accepts is the value, JSON
before string. A string stands as it is, without quotes. Only `type`, `enum` and `const` decide, through `anyOf`,
`oneOf`, `allOf` and `$ref`. Without these a schema accepts every reading.
"""

from collections.abc import Iterator, Mapping
from types import NoneType, UnionType

from harness.tokens.parsing import decode_json
from harness.types import Json

_DEEPEST = 16  # a schema may refer to itself
_WORDS: Mapping[str, object] = {"true": True, "false": False, "none": None, "null": None}
"""JSON constants as Python templates write them, in lower case."""


class ArgumentTypes:
    def __init__(self, parameters: Json) -> None:
        self._root = parameters

    def read(self, name: str, text: str) -> object:
        """Return the value of the argument `name`, or `text` itself if the schema does not decide."""
        schema = next(self._find_field(name, self._root, _DEEPEST), None)
        if schema is None:
            return text
        decoded = decode_json(text)
        is_null = text.strip() == "null"
        readings = [decoded] if not isinstance(decoded, str | None) else []
        if (word := text.strip().lower()) in _WORDS:
            readings.append(_WORDS[word])
        for reading in (*readings, text):
            if self._accepts(schema, reading, _DEEPEST):
                return reading
        return None if is_null else text

    def _find_field(self, name: str, schema: object, levels: int) -> Iterator[object]:
        schema = self._resolve(schema)
        if not isinstance(schema, dict) or not levels:
            return
        properties, others = schema.get("properties"), schema.get("additionalProperties")
        if isinstance(properties, dict) and name in properties:
            yield properties[name]
        for kind in ("allOf", "anyOf", "oneOf"):
            for part in _parts(schema, kind):
                yield from self._find_field(name, part, levels - 1)
        if isinstance(others, dict):
            yield others

    def _accepts(self, schema: object, value: object, levels: int) -> bool:
        schema = self._resolve(schema)
        if not isinstance(schema, dict) or not levels:
            return schema is not False
        if value is None and schema.get("nullable") is True:
            return True
        if "type" in schema or "properties" in schema or "items" in schema:
            implied = "object" if "properties" in schema else "array"
            kinds = schema.get("type", implied)
            if not any(_is_a(kind, value) for kind in (kinds if isinstance(kinds, list) else [kinds])):
                return False
        allowed = [*_parts(schema, "enum"), *([schema["const"]] if "const" in schema else [])]
        if allowed and not any(type(each) is type(value) and each == value for each in allowed):
            return False
        choices = [_parts(schema, kind) for kind in ("anyOf", "oneOf")]
        return all(self._accepts(part, value, levels - 1) for part in _parts(schema, "allOf")) and all(
            any(self._accepts(part, value, levels - 1) for part in parts) for parts in choices if parts
        )

    def _resolve(self, schema: object) -> object:
        for _ in range(_DEEPEST):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                break
            found: object = self._root
            for step in schema["$ref"].removeprefix("#").split("/")[1:]:
                key = step.replace("~1", "/").replace("~0", "~")
                found = found.get(key) if isinstance(found, dict) else None
            schema = found
        return schema


def _parts(schema: Json, kind: str) -> list[object]:
    parts = schema.get(kind)
    return parts if isinstance(parts, list) else []


def _is_a(kind: object, value: object) -> bool:
    kind = _ALIASES.get(kind, kind) if isinstance(kind, str) else None
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _KINDS.get(kind, object))


_ALIASES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object", "list": "array"}
"""Python's names, which hand-written schemas have."""
_KINDS: Mapping[object, type | UnionType] = {
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": int | float,
    "object": dict,
    "array": list,
    "null": NoneType,
}

"""Validate scenario data; each problem is one line. No other module handles pydantic's errors."""

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from harness.errors import ScenarioError
from harness.rollouts.agents.profile import closest

_Model = TypeVar("_Model", bound=BaseModel)

WHOLE_SENTENCE = "whole_sentence"
"""Type of an error with a complete message."""

_MAX_SHOWN = 60


class Strict(BaseModel):
    """Table of a file, without conversions and unknown keys; docstrings of its keys go into the schema."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


def validate(model: type[_Model], data: Any, *, source: Path | str) -> _Model:
    """Parse `data` as a `model`. Raises `ScenarioError`, one line per problem."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = (f"{source}: {_describe(model, details)}" for details in error.errors(include_url=False))
        raise ScenarioError("\n".join(lines)) from error


def suggestion(word: str, known: Sequence[str]) -> str:
    """Return `; did you mean 'x'?` for the closest word, else list `known`."""
    return f"; {closest(word, known)}" if known else ""


def _describe(model: type[BaseModel], details: ErrorDetails) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in details["loc"])
    key = path.lstrip(".") or "file"
    match details["type"]:
        case "extra_forbidden":
            *parents, name = details["loc"]
            return f"{key}: expected a known key, got {name!r}{suggestion(str(name), _keys_at(model, parents))}"
        case "missing":
            return f"{key}: expected a value, got nothing"
        case "whole_sentence":
            return f"{key}: {details['msg']}"
        case _:
            expected = details["msg"]
            for prefix in ("Input should be ", "String should ", "List should ", "Value error, "):
                expected = expected.removeprefix(prefix)
            seen = repr(details["input"])
            return f"{key}: expected {expected}, got {seen[:_MAX_SHOWN]}{'...' * (len(seen) > _MAX_SHOWN)}"


def _keys_at(model: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    table: type[BaseModel] | None = model
    for name in (part for part in location if isinstance(part, str)):
        field = table.model_fields.get(name) if table else None
        table = next(_models_in(field.annotation), None) if field else None
    return list(table.model_fields) if table else []


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)

"""Filters of rows: `column=value`, or another of `=`, `!=`, `<`, `<=`, `>`, `>=`, `~` (regular expression).

`a.b` is `b` in `a`.
"""

import json
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from harness.errors import ScenarioError
from harness.types import Json

_FORM = re.compile(r"\s*([^=!<>~]+?)\s*(!=|<=|>=|=|<|>|~)\s*(.*?)\s*", re.DOTALL)
_ORDERS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True, slots=True)
class Filter:
    """A condition on a column."""

    column: str
    operator: str
    value: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a filter. Raises `ScenarioError`."""
        form = _FORM.fullmatch(text)
        if form is None:
            raise ScenarioError(f"filter: expected COLUMN=VALUE, or one of != < <= > >= ~, got {text!r}")
        if form[2] == "~":
            try:
                re.compile(form[3])
            except re.error as error:
                raise ScenarioError(
                    f"filter: expected a regular expression behind ~, got {form[3]!r}: {error}"
                ) from None
        return cls(form[1], form[2], form[3])

    @property
    def top(self) -> str:
        """Column of the row that holds the value."""
        return self.column.partition(".")[0]

    def fits(self, row: Json) -> bool:
        """Return True if the condition holds: numerically between numbers, else as text. No value fits no order."""
        value: Any = row
        for name in [self.column] if self.column in row else self.column.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if self.operator == "~":
            return value is not None and re.search(self.value, text) is not None
        found, wanted = _number(text), _number(self.value)
        pair = (text, self.value) if found is None or wanted is None else (found, wanted)
        if self.operator in ("=", "!="):
            return (pair[0] == pair[1]) is (self.operator == "=")
        return value is not None and _ORDERS[self.operator](*pair)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None

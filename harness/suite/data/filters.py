"""Filters of rows: `column=value`, or `!=`, `<`, `<=`, `>`, `>=`, `~`; `a.b` is `b` in `a`."""

import json
import operator
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from harness.errors import ScenarioError
from harness.types import Json

_FORM = re.compile(r"\s*([^=!<>~]+?)\s*(!=|<=|>=|=|<|>|~)\s*(.*?)\s*", re.DOTALL)
_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "~": lambda found, wanted: re.search(wanted, found) is not None,
}


@dataclass(frozen=True, slots=True)
class Filter:
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
        """Return True if it holds. A missing value is `null`, in no order.

        Numbers compare by value, and so does the order of texts that name numbers; anything else compares as text.
        """
        value: Any = row
        for name in [self.column] if self.column in row else self.column.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is None and self.operator not in ("=", "!="):
            return False
        found = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if self.operator[0] in "<>" or (self.operator != "~" and isinstance(value, int | float)):
            with suppress(ValueError):
                return _COMPARE[self.operator](_number(found), _number(self.value))
        return _COMPARE[self.operator](found, self.value)


def _number(text: str) -> int | float:
    try:
        return int(text)  # exact, which a float of 2^53 or more is not
    except ValueError:
        return float(text)

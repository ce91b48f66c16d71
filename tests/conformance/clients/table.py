"""Tables between two marks of a page of the docs."""

import re
from collections.abc import Sequence
from pathlib import Path


def table_in(page: str, begin: str, end: str) -> list[str]:
    """The lines of the table in the text of the page."""
    return page.partition(begin)[2].partition(end)[0].strip().splitlines()


def without_seconds(lines: Sequence[str]) -> list[str]:
    """What does not depend on the machine."""
    return [re.sub(r"\d+\.\d s", "_ s", line) for line in lines]


def write(page: Path, table: Sequence[str], begin: str, end: str) -> None:
    """Put the table where the page has its marks."""
    text = page.read_text(encoding="utf-8")
    lines = "\n".join([begin, "", *table, "", end])
    page.write_text(f"{text.partition(begin)[0]}{lines}{text.partition(end)[2]}", encoding="utf-8")


def row(cells: Sequence[str]) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"

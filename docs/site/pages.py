"""The pages of the documentation, in the order and under the headings of docs/README.md: the one index there is.

The navigation of the site and llms.txt are made from it; a page that it leaves out is an error of the build.
"""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
INDEX = Path("docs/README.md")


class Page(NamedTuple):
    """A page that the index names."""

    path: Path
    """From the root of the repository."""
    title: str
    """Its own heading."""
    says: str
    """What the index says of it, without markup."""


def sections() -> dict[str, list[Page]]:
    """The pages of each heading of the index; the README of a folder stands for all pages in it."""
    headed: dict[str, list[Page]] = {}
    for line in (ROOT / INDEX).read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            headed[line[3:]] = []
        elif found := re.match(r"- \[[^\]]*\]\(([^)#]+)\)(: )?(.*)", line):
            link, is_told, rest = found.groups()
            says = _without_markup(rest if is_told else line[2:])
            [*headed.values()][-1].extend(_pages_at(link, says))
    return headed


def _pages_at(link: str, says: str) -> list[Page]:
    target = (ROOT / INDEX.parent / link).resolve()
    is_folder = target.name == "README.md" and target.parent.parent == ROOT / INDEX.parent
    files = [target, *sorted(set(target.parent.glob("*.md")) - {target})] if is_folder else [target]
    return [Page(file.relative_to(ROOT), _title(file), says if file == target else "") for file in files]


def _title(page: Path) -> str:
    """The first heading; of a page without one the name of its file."""
    found = re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return found[1].replace("`", "") if found else page.stem


def _without_markup(text: str) -> str:
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("`", "")

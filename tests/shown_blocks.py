"""The blocks of code that README, docs and examples show, and what their commands are run with."""

import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.checkout import ROOT
from tests.warm_harness import warm_harness

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*/README.md"))]


class Block(NamedTuple):
    """A fenced block."""

    page: str
    text: str
    line: int


def shown_blocks(language: str) -> Iterator[Block]:
    """Every block in that language, in the order of the pages."""
    pattern = re.compile(rf"^```{language}\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in pattern.finditer(text):
            yield Block(page.name, found[1], text.count("\n", 0, found.start()) + 1)


def is_quickstart_of_the_readme(page: str, text: str) -> bool:
    """Whether the block is the one whose run `tests/system/test_quickstart_run.py` makes and looks at."""
    return page == "README.md" and "harness run quickstart" in text


def commands_on_path() -> Mapping[str, str]:
    """Our environment, in which `harness` is a command."""
    return os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def forked_commands_on_path(folder: Path) -> Mapping[str, str]:
    """The same, with a program in `folder` that spares `harness` its imports."""
    folder.mkdir()
    warm_harness().write_program(folder / "harness")
    ours = commands_on_path()
    return {**ours, "PATH": f"{folder}{os.pathsep}{ours['PATH']}"}

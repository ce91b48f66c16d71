"""Measure the prose of the code: `python -m tests.prose` prints the figures, and where they are worst.

The rules are those of AGENTS.md. `tests/unit/test_prose.py` holds the budgets, which may only fall.
"""

import ast
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path

from tests.checkout import ROOT

SOURCES = ("harness", "server_patch")
NOUN_STARTS = re.compile(
    r"(What|Who|Whose|How|Where|Whether|Which|When|Of|That of|Those|Nobody|Somebody|Whoever|Has|Have it|Is)\b"
)
BANNED = re.compile(
    r"\b(nobody|somebody|whoever|anybody|who asks|others'|comes to|what there is|is told|was told|are told)\b",
    re.IGNORECASE,
)
NOT_IMPERATIVE = re.compile(
    r"(The|A|An|Those|What|Whether|How|Where|Of|That|This|These|It|None|True|False|No|Every|Each|All|Its|Their)\b"
)
_LONG_FILE = 40


@dataclass
class Prose:
    """Figures of all files, and the places that fall short."""

    lines: int = 0
    words: int = 0
    """Of docstrings."""
    files: list[Path] = field(default_factory=list)
    functions: int = 0
    """With a docstring, properties excepted."""
    not_imperative: int = 0
    noun_starts: int = 0
    banned: int = 0
    classes: Counter[str] = field(default_factory=Counter)
    dense: list[tuple[int, str]] = field(default_factory=list)
    """Words per 1,000 lines, and the file."""
    places: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, int]:
        """What has a budget."""
        return {
            "docstring words per 1,000 lines": 1000 * self.words // self.lines,
            "docstrings that begin with What, Of, How ...": self.noun_starts,
            "functions that do not begin with a verb": self.not_imperative,
            "banned words": self.banned,
            "class names used twice": sum(count > 1 for count in self.classes.values()),
            "lines": self.lines,
        }


def measure() -> Prose:
    """Look at every file under version control."""
    listed = subprocess.run(["git", "ls-files", *SOURCES], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    prose = Prose()
    for name in listed.splitlines():
        if name.endswith(".py"):
            prose.files.append(ROOT / name)
            _add_file(prose, ROOT / name, name)
    return prose


def count_comments(files: Iterable[Path]) -> int:
    """Read the tokens, which takes as long as all that has a budget."""
    lines = chain.from_iterable(each.read_text(encoding="utf-8").splitlines(keepends=True) for each in files)
    comments = (token.string for token in tokenize.generate_tokens(lines.__next__) if token.type == tokenize.COMMENT)
    return sum(not re.match(r"#\s*(noqa|type:|pragma|!)", each) for each in comments)


def _add_file(prose: Prose, path: Path, name: str) -> None:
    text = path.read_text(encoding="utf-8")
    nodes = [*ast.walk(ast.parse(text))]
    lines, before = text.count("\n"), prose.words
    prose.lines += lines
    prose.classes.update(node.name for node in nodes if isinstance(node, ast.ClassDef))
    for node, doc in _docstrings(nodes):
        _add_docstring(prose, node, doc, f"{name}:{getattr(node, 'lineno', 1)}")
    if lines > _LONG_FILE:
        prose.dense.append((1000 * (prose.words - before) // lines, name))


def _add_docstring(prose: Prose, node: ast.AST, doc: str, where: str) -> None:
    first, before = doc.partition("\n")[0], (prose.noun_starts, prose.not_imperative, prose.banned)
    prose.words += len(doc.split())
    prose.banned += len(BANNED.findall(doc))
    prose.noun_starts += bool(NOUN_STARTS.match(first))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_property(node):
        prose.functions += 1
        prose.not_imperative += bool(NOT_IMPERATIVE.match(first))
    if before != (prose.noun_starts, prose.not_imperative, prose.banned):
        prose.places.append(f"{where} {first}")


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("property" in ast.unparse(each) for each in node.decorator_list)


def _docstrings(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.AST, str]]:
    """Docstrings, and the texts below attributes."""
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if text := ast.get_docstring(node):
                yield node, text
            for before, after in pairwise(node.body):
                match before, after:
                    case ast.Assign() | ast.AnnAssign(), ast.Expr(ast.Constant(str(text))):
                        yield before, text.strip()


def main() -> None:
    """Print the figures, and the files and places of those named on the command line, else the densest files."""
    prose = measure()
    wanted = sys.argv[1:]
    for per_line, name in sorted(prose.dense, reverse=True):
        if name.startswith(tuple(wanted)) if wanted else per_line > 3 * 1000:
            print(f"{per_line:6} words per 1,000 lines  {name}")
    for place in prose.places:
        if wanted and place.startswith(tuple(wanted)):
            print(place)
    for name, figure in prose.figures().items():
        print(f"{figure:6} {name}")
    share = 100 * count_comments(prose.files) / prose.lines
    print(f"{share:6.2f} % of lines are comments, of {prose.functions} functions")


if __name__ == "__main__":
    main()

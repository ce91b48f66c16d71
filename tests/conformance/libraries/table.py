"""Writes the list of docs/agents.md that says which client libraries keep one branch.

    python -m tests.conformance.libraries.table [NAME ...]

Lines of libraries that are not named stay as they are. A test compares the list.
"""

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tests.conformance.agents.offline import run_offline
from tests.conformance.agents.table import PAGE
from tests.conformance.clients.table import table_in, write
from tests.conformance.families.packages import fetch_tokenizer
from tests.conformance.libraries.casts import LIBRARIES, QWEN2_5, QWEN3, Library
from tests.conformance.libraries.scene import Conversation, Findings, Played, prepare_cast

BEGIN, END = "<!-- libraries: begin -->", "<!-- libraries: end -->"
WAYS = ("whole", "streamed")


def play_offline(libraries: Sequence[Library]) -> Findings:
    """Every conversation of every program, whose environments are made first."""
    for family in (QWEN2_5, QWEN3):
        fetch_tokenizer(family)
    cast = asyncio.run(prepare_cast(libraries))
    with tempfile.TemporaryDirectory(prefix="libraries-") as folder:
        prepared, found = Path(folder) / "cast.json", Path(folder) / "findings.json"
        prepared.write_bytes(msgspec.json.encode(cast))
        run_offline("tests.conformance.libraries.scene", str(prepared), str(found))
        return msgspec.json.decode(found.read_bytes(), type=Findings)


def table_of(findings: Findings) -> list[str]:
    """The lines of the list."""
    return [_line(library, findings[library.name]) for library in LIBRARIES if library.name in findings]


def is_one_branch(played: Played) -> bool:
    """Whether the conversation is one branch and one sample, which is the engine's log."""
    is_whole = played.is_exact and played.is_one_sample and not played.unaccounted
    return is_whole and played.roots == played.leaves == 1


def _line(library: Library, played: dict[str, Played]) -> str:
    dialects = (_told(library, dialect, played) for dialect in library.dialects)
    return f"- {library.package} {library.version}: {'; '.join(dialects)}"


def _told(library: Library, dialect: str, played: dict[str, Played]) -> str:
    of = {
        family: [played[Conversation(dialect, way, family).name] for way in library.streams]
        for family in (QWEN2_5, QWEN3)
    }
    respelled = sorted({field for each in of.values() for one in each for field in one.respelled})
    side_calls = max(one.side_calls for each in of.values() for one in each)
    branches = "; ".join(dict.fromkeys(_branches(library, each) for each in of.values()))
    told = [f"`{field}`" for field in respelled]
    told += [f"{side_calls} side call"] * (side_calls > 0) + [branches] * (branches != "one branch")
    return f"{dialect} ({', '.join(told)})" if told else dialect


def _branches(library: Library, played: Sequence[Played]) -> str:
    ways = ["one branch" if is_one_branch(each) else f"**{each.leaves} branches**" for each in played]
    if len({*ways}) > 1:
        ways = [f"{WAYS[way]} {told}" for way, told in zip(library.streams, ways, strict=True)]
    told = ", ".join(dict.fromkeys(ways))
    return f"{told}: {library.rewrites}" if "branches" in told and library.rewrites else told


def rows_of(libraries: Sequence[Library], lines: Sequence[str]) -> list[str]:
    """Those of the list's `lines` that are about `libraries`."""
    return [line for line in lines if line.startswith(tuple(f"- {library.package} " for library in libraries))]


def main() -> None:
    """Play, and put the rows where the page has its marks, those of other libraries between them."""
    findings = play_offline([library for library in LIBRARIES if not sys.argv[1:] or library.name in sys.argv[1:]])
    before = table_in(PAGE.read_text(encoding="utf-8"), BEGIN, END)
    new = table_of(findings)
    rows = [line for library in LIBRARIES for line in rows_of([library], new if library.name in findings else before)]
    write(PAGE, rows, BEGIN, END)


if __name__ == "__main__":
    main()

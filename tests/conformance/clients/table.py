"""Writes the table of docs/abort.md that says how client libraries take a drain and a pause.

    python -m tests.conformance.clients.table

The seconds are those of the machine it runs on; everything else is the same everywhere, and a test compares it.
"""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

from harness.server.telemetry.logging import configure_logging
from tests.checkout import ROOT
from tests.conformance.clients.players import ANSWERS, LIBRARIES, ClientLibrary
from tests.conformance.clients.scenes import Findings, Played, play_all

PAGE = ROOT / "docs" / "abort.md"
BEGIN, END = "<!-- clients: begin -->", "<!-- clients: end -->"
COLUMNS = (
    "client",
    "answers",
    "drained between turns: further requests, stopped after",
    "drained in a turn: further requests, stopped after",
    "pause of 20 s",
    "503 + `retry-after`",
)
ASKED_BEFORE = 1
"""Turns that every client has had when something happens in the second one."""


def table_of(findings: Findings) -> list[str]:
    """The lines of the table."""
    return [row(COLUMNS), row(["---"] * len(COLUMNS)), *(_row(library, findings) for library in LIBRARIES)]


def table_in(page: str, begin: str = BEGIN, end: str = END) -> list[str]:
    """The lines of the table in the text of the page."""
    return page.partition(begin)[2].partition(end)[0].strip().splitlines()


def without_seconds(lines: Sequence[str]) -> list[str]:
    """What does not depend on the machine."""
    return [re.sub(r"\d+\.\d s", "_ s", line) for line in lines]


def write(page: Path, table: Sequence[str], begin: str = BEGIN, end: str = END) -> None:
    """Put the table where the page has its marks."""
    text = page.read_text(encoding="utf-8")
    lines = "\n".join([begin, "", *table, "", end])
    page.write_text(f"{text.partition(begin)[0]}{lines}{text.partition(end)[2]}", encoding="utf-8")


def row(cells: Sequence[str]) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"


def further_requests(played: Played) -> int:
    """How often a client asked after the request that told it to stop."""
    return played.requests - ASKED_BEFORE - 1


def survived(played: Played) -> bool:
    """Whether the client ended as if nothing had happened."""
    return played.ending.answers == ANSWERS


def _row(library: ClientLibrary, findings: Findings) -> str:
    between, in_flight = findings.drained_between_turns[library], findings.drained_in_flight[library]
    return row(
        [
            f"{library.package} {library.version}",
            "streamed" if library.streams else "whole",
            *(f"{further_requests(drained)}, {drained.seconds:.1f} s" for drained in (between, in_flight)),
            "goes on" if survived(findings.paused[library]) else "**fails**",
            "asks again, goes on" if survived(findings.refused_for_a_while[library]) else "**fails**",
        ]
    )


def main() -> None:
    """Play everything and write the table."""
    configure_logging("error")
    write(PAGE, table_of(asyncio.run(play_all())))


if __name__ == "__main__":
    main()

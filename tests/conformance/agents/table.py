"""Writes the table of docs/agents.md that says how agents play, and how they take a drain and a pause.

    python -m tests.conformance.agents.table

The seconds are those of the machine it runs on; everything else is the same everywhere, and a test compares it.
"""

import sys

from harness.rollouts.agents.programs import bundled_profile
from tests.checkout import ROOT
from tests.conformance.agents.offline import play_offline
from tests.conformance.agents.scenes import Findings
from tests.conformance.agents.stage import Played
from tests.conformance.clients.table import row, write

PAGE = ROOT / "docs" / "agents.md"
BEGIN, END = "<!-- agents: begin -->", "<!-- agents: end -->"
COLUMNS = (
    "agent",
    "dialect",
    "answers",
    "turns, side calls",
    "`matching` it needs",
    "drained in a tool call: further requests, stopped after",
    "drained in a turn",
)


def table_of(findings: Findings) -> list[str]:
    """The lines of the table."""
    names = sorted(findings.paused)
    return [row(COLUMNS), row(["---"] * len(COLUMNS)), *(_row(name, findings) for name in names)]


def further_requests(played: Played) -> int:
    """How often an agent asked after the request that told it to stop."""
    return sum(played.refusals.values()) - 1


def _row(name: str, findings: Findings) -> str:
    profile, paused = bundled_profile(name), findings.paused[name]
    drains = (findings.drained_between_turns[name], findings.drained_in_flight[name])
    return row(
        [
            f"{name} {profile.version}",
            profile.spec.dialect,
            "streamed" if paused.streamed else "whole",
            f"{paused.main_turns}, {paused.side_calls}",
            ", ".join(f"`{each}`" for each in profile.spec.session.matching) or "none",
            *(f"{further_requests(each)}, {each.seconds:.1f} s" for each in drains),
        ]
    )


if __name__ == "__main__":
    write(PAGE, table_of(play_offline(sys.argv[1:])), BEGIN, END)

"""Records of faults: `faults.jsonl`, a line per firing, and a scenario's report.

A line has, for each session present: its state, its agent's later error answers, its outcome and tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from harness.decoding import read_json
from harness.machine.disk import disk_failures
from harness.sessions.ledger import Ledger
from harness.suite.judge.verdicts import Verdict
from harness.suite.scenarios.fault import Fault
from harness.types import Json


class Bystander(msgspec.Struct, frozen=True, kw_only=True):
    """A session present at a firing."""

    session: int
    """Position in the scenario."""
    turn: int
    """Model calls so far."""
    in_flight: bool
    outcome: str = "unfinished"
    """`unfinished` when the run ended first."""
    turns: dict[str, int] = {}
    told: dict[str, int] = {}
    """Later error answers to its agent, by status and code."""

    @property
    def words(self) -> str:
        turns = ", ".join(f"{count} {status}" for status, count in sorted(self.turns.items())) or "no turn"
        told = ", ".join(f"{words} x{count}" if count > 1 else words for words, count in sorted(self.told.items()))
        state = "in turn" if self.in_flight else "after turn"
        return f"session {self.session} {state} {self.turn}: {self.outcome}, {turns}{f'; told {told}' if told else ''}"


class Firing(msgspec.Struct, frozen=True, kw_only=True):
    scenario: str
    fault: int
    """Position in the scenario."""
    action: str
    trigger: str
    at_s: float
    """Seconds since the scenario began."""
    at: float | None = None
    """Unix seconds; None in older runs."""
    session: int | None = None
    """Session that triggered it; None for the clock."""
    turn: int = 0
    tokens: int = 0
    """Tokens sampled in that turn."""
    did: str = ""
    problem: str = ""
    sessions: tuple[Bystander, ...] = ()
    ledger: Ledger = Ledger()
    """Sum over the sessions present."""

    @property
    def words(self) -> str:
        where = "" if self.session is None else f" by session {self.session}, turn {self.turn}"
        after = f" after {self.tokens} tokens" if self.tokens else ""
        return f"{self.at_s:.2f} s{where}{after}: {self.problem or self.did}"


@dataclass(frozen=True, slots=True)
class FaultReport:
    fault: Fault
    firings: Sequence[Firing]

    def to_json(self) -> Json:
        firings = [msgspec.to_builtins(firing) for firing in self.firings]
        return {"action": self.fault.action, "trigger": self.fault.trigger, "fired": len(firings), "firings": firings}


class FaultLog:
    """`faults.jsonl` of a run. Methods raise `StoreError`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, firing: Firing) -> None:
        with disk_failures(self._path), self._path.open("ab") as file:
            file.write(_line(firing))

    def replace(self, firings: Sequence[Firing]) -> None:
        scratch = self._path.with_name(f".{self._path.name}")
        with disk_failures(self._path):
            scratch.write_bytes(b"".join(map(_line, firings)))
            scratch.replace(self._path)

    def read(self) -> list[Firing]:
        """Return complete lines, if any."""
        if not self._path.is_file():
            return []
        with disk_failures(self._path):
            content = self._path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]  # a killed run may leave half a line
        return [read_json(line, Firing) for line in whole.splitlines()]


def report_faults(scenario: str, faults: Sequence[Fault], firings: Sequence[Firing]) -> list[FaultReport]:
    mine = [firing for firing in firings if firing.scenario == scenario]
    return [
        FaultReport(fault, [firing for firing in mine if firing.fault == position])
        for position, fault in enumerate(faults)
    ]


def judge_faults(reports: Sequence[FaultReport], *, expects_all: bool) -> Iterator[Verdict]:
    """Decide whether faults fired and worked as expected."""
    problems = [
        f"{each.fault.action}: {firing.problem}" for each in reports for firing in each.firings if firing.problem
    ]
    if reports:
        yield Verdict("faults", "each does what it says", "; ".join(problems) or "all did", not problems)
    if reports and expects_all:
        missing = [f"{each.fault.action} {each.fault.trigger}" for each in reports if not each.firings]
        seen = f"never: {', '.join(missing)}" if missing else "all came"
        yield Verdict("expect_faults_fired", "every fault comes", seen, not missing)


def _line(firing: Firing) -> bytes:
    return msgspec.json.encode(firing) + b"\n"

"""The effects of faults, as data: a line of `faults.jsonl` for each time that one came, and the report of a scenario's.

A line holds every session that was there: how it stood at that moment, what its agent was told from then on, how it
ended, and where its tokens went. Lines outlive the run that wrote them; a run that is resumed adds its own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from harness.machine.disk import disk_failures
from harness.sessions.ledger import Ledger
from harness.suite.judge.verdicts import Verdict
from harness.suite.scenarios.fault import Fault
from harness.types import Json


class Bystander(msgspec.Struct, frozen=True, kw_only=True):
    """A session that was there when a fault came."""

    session: int
    """Its position in the scenario."""
    turn: int
    """Model calls that it had made by then."""
    in_flight: bool
    """One of them was being answered."""
    outcome: str = "unfinished"
    """How its rollout ended; `unfinished` when the run ended first."""
    turns: dict[str, int] = {}
    """Its turns in the end, by status."""
    told: dict[str, int] = {}
    """Answers that its agent got from then on and that were no success, by status and code."""

    @property
    def words(self) -> str:
        """One line for a reader."""
        turns = ", ".join(f"{count} {status}" for status, count in sorted(self.turns.items())) or "no turn"
        told = ", ".join(f"{words} x{count}" if count > 1 else words for words, count in sorted(self.told.items()))
        state = "in turn" if self.in_flight else "after turn"
        return f"session {self.session} {state} {self.turn}: {self.outcome}, {turns}{f'; told {told}' if told else ''}"


class Firing(msgspec.Struct, frozen=True, kw_only=True):
    """One time that a fault came."""

    scenario: str
    fault: int
    """Its position among those of the scenario."""
    action: str
    trigger: str
    at_s: float
    """Since the scenario began."""
    at: float | None = None
    """The same moment in Unix seconds; None of a run of an older version."""
    session: int | None = None
    """The session whose turn triggered it; None when the clock did."""
    turn: int = 0
    tokens: int = 0
    """Of that turn."""
    did: str = ""
    """Its immediate effect, in words."""
    problem: str = ""
    """Why it could not do it."""
    sessions: tuple[Bystander, ...] = ()
    ledger: Ledger = Ledger()
    """Of the sessions that were there."""

    @property
    def words(self) -> str:
        """One line for a reader."""
        where = "" if self.session is None else f" by session {self.session}, turn {self.turn}"
        after = f" after {self.tokens} tokens" if self.tokens else ""
        return f"{self.at_s:.2f} s{where}{after}: {self.problem or self.did}"


@dataclass(frozen=True, slots=True)
class FaultReport:
    """One fault of a scenario and every time that it came."""

    fault: Fault
    firings: Sequence[Firing]

    def to_json(self) -> Json:
        """The form of `result.json`."""
        firings = [msgspec.to_builtins(firing) for firing in self.firings]
        return {"action": self.fault.action, "trigger": self.fault.trigger, "fired": len(firings), "firings": firings}


class FaultLog:
    """`faults.jsonl` of a run directory; the methods raise `StoreError`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, firing: Firing) -> None:
        """Add the line of a fault that has just come."""
        with disk_failures(self._path), self._path.open("ab") as file:
            file.write(_line(firing))

    def replace(self, firings: Sequence[Firing]) -> None:
        """Put `firings` in the place of all lines."""
        scratch = self._path.with_name(f".{self._path.name}")
        with disk_failures(self._path):
            scratch.write_bytes(b"".join(map(_line, firings)))
            scratch.replace(self._path)

    def read(self) -> list[Firing]:
        """Every whole line; none when there is no file."""
        if not self._path.is_file():
            return []
        with disk_failures(self._path):
            content = self._path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]  # a run that was killed may have left half a line
        return [msgspec.json.decode(line, type=Firing) for line in whole.splitlines()]


def report_faults(scenario: str, faults: Sequence[Fault], firings: Sequence[Firing]) -> list[FaultReport]:
    """The report on each of `faults`, in their order."""
    mine = [firing for firing in firings if firing.scenario == scenario]
    return [
        FaultReport(fault, [firing for firing in mine if firing.fault == position])
        for position, fault in enumerate(faults)
    ]


def judge_faults(reports: Sequence[FaultReport], *, expects_all: bool) -> Iterator[Verdict]:
    """Whether faults came that had to, and did what they should."""
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

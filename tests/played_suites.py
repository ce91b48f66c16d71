"""Suites that are run in this process, and a look at what they leave behind."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from harness.rollouts.client.session_server import SessionSummary
from harness.suite.record.config import Overrides
from harness.suite.record.rollout_table import RolloutRecord
from harness.suite.run.interrupts import Interrupts
from harness.suite.run.open_run import begin_run
from harness.suite.run.report import RunReport
from harness.suite.run.runner import SuiteRun
from harness.suite.scenarios.plan import PlannedRollout
from harness.turn_ends import TurnStatus
from harness.types import Sample
from tests.session_servers.store_file import read_file


class Silence:
    """A `Progress` that is not watched."""

    def say(self, text: str) -> None:
        """Say nothing."""

    def begin(self, total: int, done: int) -> None:
        """Say nothing."""

    def begin_rollout(self, rollout: PlannedRollout) -> None:
        """Say nothing."""

    def look(self, sessions: Mapping[str, SessionSummary]) -> None:
        """Say nothing."""

    def end_rollout(self, record: RolloutRecord) -> None:
        """Say nothing."""


async def play(suite: Path | str, out: Path, overrides: Overrides | None = None) -> RunReport:
    """Run `suite`."""
    opened = begin_run(str(suite), overrides or Overrides(), out)
    return await SuiteRun(opened.selection, opened.directory, Silence(), Interrupts()).execute()


def incomplete_inside(database: Path, samples: Iterable[Sample]) -> list[list[int]]:
    """Incomplete turns, read from the file by somebody else, behind which a sample has a token (I2, I3)."""
    sessions = read_file(database)
    return [
        turn.tokens
        for sample in samples
        for turn in sessions[sample.metadata["session_id"]].turns.values()
        if turn.status != TurnStatus.COMPLETED
        if len(turn.tokens) < sample.tokens.size and sample.tokens[: len(turn.tokens)].tolist() == turn.tokens
    ]

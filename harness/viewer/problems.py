"""Problems of a run, grouped by equal cause, and the command to type next. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from harness.errors import Cause
from harness.samples.rollout import ENDED_WELL, OutcomeKind
from harness.suite.judge.verdicts import sessions_words
from harness.types import Json
from harness.viewer.run_view import SessionLine

_NOT_WRONG = frozenset({*ENDED_WELL, OutcomeKind.DRAINED})
_MOST = 160
"""Characters of a cause."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Rollouts that went wrong for one cause."""

    cause: str
    sessions: Sequence[int]
    """Numbers of the rollouts."""
    log: Path | None
    """Agent log of the first, if it has one."""

    @property
    def words(self) -> str:
        log = "" if self.log is None else f", log {self.log}"
        return f"{len(self.sessions)} x {self.cause}: {sessions_words(self.sessions)}{log}"

    def to_json(self) -> Json:
        """Return the form of `harness run --json`."""
        log = None if self.log is None else str(self.log)
        return {"cause": self.cause, "sessions": list(self.sessions), "log": log}


def find_problems(lines: Iterable[SessionLine]) -> list[Problem]:
    """Group the rollouts that failed, have no score, or earned nothing and say why; the most frequent cause first."""
    alike: dict[str, list[SessionLine]] = {}
    for line in lines:
        if line.number is not None and (cause := _cause(line)):
            alike.setdefault(cause, []).append(line)
    problems = [
        Problem(cause, [line.number for line in lines if line.number is not None], lines[0].agent_log)
        for cause, lines in alike.items()
    ]
    return sorted(problems, key=lambda each: -len(each.sessions))  # stable: equals in order of their sessions


def next_command(run: Path, problems: Sequence[Problem], *, is_complete: bool) -> str:
    """Return the command that resumes the run, else shows its most frequent problem, else its sessions."""
    if not is_complete:
        return f"harness run {quote(str(run))} --resume"
    session = f" {problems[0].sessions[0]}" if problems else ""
    return f"harness show {quote(str(run))}{session}"


def _cause(line: SessionLine) -> str | None:
    reason = str(line.score.get("reason", ""))
    if line.outcome not in _NOT_WRONG or line.cause not in (None, Cause.LIMIT):
        words = line.last_words or line.detail or str(line.outcome)
    elif line.score_error is not None:
        words = f"no score, {line.score_error}"
    elif line.reward is not None and line.reward <= 0 and reason:
        words = f"reward {line.reward:g}, {reason}"
    else:
        return None
    words = " ".join(words.split())
    return words if len(words) <= _MOST else f"{words[:_MOST]}..."

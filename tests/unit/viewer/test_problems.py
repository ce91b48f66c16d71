"""What went wrong in a run, once for each cause, and what to type next."""

from pathlib import Path
from typing import Any

from harness.errors import Cause
from harness.samples.rollout import OutcomeKind
from harness.viewer.problems import find_problems, next_command
from harness.viewer.run_view import SessionLine
from tests.recorded_runs import rollout_record

LOG = Path("run/sessions/0/agent.log")
DOWN = "no database at localhost:5432"
CRASHED: dict[str, Any] = {"outcome": OutcomeKind.CRASHED, "cause": Cause.AGENT, "detail": "exit code 1; 0 turns"}


def _line(number: int, said: str | None = None, **values: Any) -> SessionLine:
    record = rollout_record(number=number, session_id=f"{number:032x}", **values)
    return SessionLine.of(record, None if said is None else LOG, () if said is None else ("began", said))


def test_equal_causes_are_one_problem() -> None:
    """The most frequent first; a good end is none, and an abort is nobody's fault."""
    lines = [_line(number, DOWN, **CRASHED) for number in (0, 1, 2, 3)]
    lines += [_line(4, **CRASHED), _line(5, "bye", reward=1.0, reason="all right"), _line(6, reward=0.0)]
    lines += [_line(7, outcome=OutcomeKind.DRAINED, cause=Cause.LIMIT, detail="stopped")]
    lines += [_line(8, outcome=OutcomeKind.TIMED_OUT, cause=Cause.LIMIT, detail="timed out (60 s)")]
    lines += [_line(number, reward=0.0, reason="got 41,\nexpected 42") for number in (9, 10)]
    lines += [_line(11, score_error="check.py: expected a finite number as the reward, got nan")]

    assert [each.words for each in find_problems(lines)] == [
        f"4 x {DOWN}: sessions 0-3, log {LOG}",
        "2 x reward 0, got 41, expected 42: sessions 9-10",
        "1 x exit code 1; 0 turns: session 4",
        "1 x timed out (60 s): session 8",
        "1 x no score, check.py: expected a finite number as the reward, got nan: session 11",
    ]


def test_the_next_command_takes_up_an_unfinished_run() -> None:
    """Otherwise it shows the first session of the most frequent problem, or all of them."""
    problems, run = find_problems([_line(3, DOWN, **CRASHED)]), Path("runs/a b")

    assert next_command(run, problems, is_complete=False) == "harness run 'runs/a b' --resume"
    assert next_command(run, problems, is_complete=True) == "harness show 'runs/a b' 3"
    assert next_command(run, [], is_complete=True) == "harness show 'runs/a b'"


def test_a_score_has_what_the_check_gave_and_no_more() -> None:
    """The document that the page and `show --json` read."""
    whole = _line(0, reward=0.0, figures={"tests": 3.0}, reason="3 of 7 pass", score={"log": "x"})

    assert whole.score == {"reward": 0.0, "figures": {"tests": 3.0}, "reason": "3 of 7 pass", "details": {"log": "x"}}
    assert _line(1, reward=1.0).score == {"reward": 1.0}
    assert _line(2, score_error="check.py: late").score == {}

"""A check is a guest: whatever it does, the run gets a score or a reason."""

import time
from pathlib import Path

import pytest

from harness.suite.judge.reward import Score, score_session


async def _score(tmp_path: Path, body: str, *, deadline_s: float = 20) -> Score:
    check = tmp_path / "check.py"
    check.write_text(body)
    return await score_session(check, {"turns": [1, 2]}, {"n": 3}, {"k": 4}, deadline_s=deadline_s)


async def test_a_check_sees_the_session_the_result_and_the_metadata(tmp_path: Path):
    body = "def score(session, result, metadata):\n    return len(session['turns']) + result['n'] + metadata['k']"
    assert await _score(tmp_path, body) == Score(reward=9.0)


async def test_a_check_can_say_more_than_a_number(tmp_path: Path):
    """What is beside `reward` is kept; what it prints does not disturb."""
    body = "def score(*_):\n    print('hello')\n    return {'reward': 1, 'why': 'so'}"
    assert await _score(tmp_path, body) == Score(reward=1.0, details={"why": "so"})


async def test_a_check_can_say_which_turns_earned_the_reward(tmp_path: Path):
    """By index, which JSON makes a text, or by tool call."""
    body = "def score(*_):\n    return {'reward': 1, 'turn_rewards': {0: 0.5, 'call_1': None}, 'why': 'so'}"
    assert await _score(tmp_path, body) == Score(1.0, {"why": "so"}, {"0": 0.5, "call_1": None})


_FIELDS = "    reward: int\n    score: dict\n    reason: str\n    log: str\n"
_ANSWERS = "def score(*_): return Score(0, {'tests': 3}, '3 of 7 tests pass', 'x')"


@pytest.mark.parametrize(
    "body",
    [
        "def score(*_): return {'reward': 0, 'score': {'tests': 3}, 'reason': ' 3 of 7 tests pass\\n', 'log': 'x'}",
        f"from typing import NamedTuple\nclass Score(NamedTuple):\n{_FIELDS}{_ANSWERS}",
        f"from dataclasses import dataclass\n@dataclass\nclass Score:\n{_FIELDS}{_ANSWERS}",
    ],
)
async def test_a_check_can_say_why(tmp_path: Path, body: str):
    """A mapping, a named tuple and a dataclass mean the same."""
    score = await _score(tmp_path, body)

    assert score == Score(0.0, {"log": "x"}, figures={"tests": 3.0}, reason="3 of 7 tests pass")


async def test_a_figure_without_a_name_is_kept(tmp_path: Path):
    """Checks that gave a number as `score` before it had a meaning continue working."""
    assert await _score(tmp_path, "def score(*_): return {'reward': 1, 'score': 0.5}") == Score(
        1.0, figures={"score": 0.5}
    )


@pytest.mark.parametrize("kept", [{"score": {"a": True}}, {"score": "3/4"}, {"score": None}, {"reason": ["a", "b"]}])
async def test_what_is_no_figure_and_no_reason_stays_in_the_details(tmp_path: Path, kept: dict[str, object]):
    """A check may have used these names before they meant something."""
    score = await _score(tmp_path, f"def score(*_): return {{'reward': 1, **{kept!r}}}")

    assert (score.reward, score.details, score.figures, score.reason) == (1.0, kept, {}, "")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("def score(*_): return {'reward': 1, 'turn_rewards': [1]}", "check.py: turn_rewards: expected an object, by"),
        ("def score(*_): raise ValueError('bad')", "check.py: ValueError: bad (line 1)"),
        ("def score(*_): return float('nan')", "check.py: expected a finite number as the reward, got nan"),
        ("def score(*_): return float('inf')", "check.py: expected a finite number as the reward, got inf"),
        ("def score(*_): return True", "check.py: expected a finite number as the reward, got True"),
        ("def score(*_): return '0.5'", "check.py: expected a finite number as the reward, got '0.5'"),
        (
            "def score(*_): return {'reward': 1, 'score': {'a': float('nan')}}",
            "check.py: expected a finite number as the figure 'a', got nan",
        ),
        ("def score(*_): return None", "check.py: expected a finite number as the reward, got None"),
        ("def score(*_): return {'rewrd': 1}", "check.py: expected a number under 'reward', got the keys ['rewrd']"),
        ("def scoer(*_): return 1", "check.py: defines no function `score`"),
        ("def score(*_): return {}['x']", "check.py: KeyError: 'x' (line 1)"),
        ("import sys\ndef score(*_): sys.exit(0)", "check.py: SystemExit: 0 (line 2)"),
        ("import os\ndef score(*_): os._exit(7)", "check.py: ended with code 7 and no score"),
        ("import os, signal\ndef score(*_): os.kill(0, signal.SIGKILL)", "check.py: ended with code -9 and no score"),
        ("def score(*_): return object()", "TypeError"),
        ("def score(*_): return {'reward': 1, 'file': chr(0xD800)}", "check.py: expected text, got a lone surrogate"),
        ("def score(*_): raise ValueError(chr(0xD800))", "check.py: expected text, got a lone surrogate"),
        ("def score(", "SyntaxError"),
        ("def score(*_): return 10 ** 400", "check.py: expected a finite number as the reward, got 1000"),
        ("def score(*_): return {'reward': 1, 'log': 'x' * 2000000}", "check.py: expected one line as the answer, got"),
    ],
)
async def test_a_check_that_fails_gives_a_reason(tmp_path: Path, body: str, reason: str):
    score = await _score(tmp_path, body)

    assert score.reward is None
    assert score.error is not None
    assert reason in score.error


async def test_a_check_that_hangs_is_ended_with_what_it_started(tmp_path: Path):
    """A child that keeps the pipes open does not keep the run waiting either."""
    body = "import subprocess, time\ndef score(*_):\n    subprocess.Popen(['sleep', '60'])\n    time.sleep(60)"
    began = time.monotonic()

    assert await _score(tmp_path, body, deadline_s=0.5) == Score(error="check.py: gave no score within 0.5 s")
    assert time.monotonic() - began < 40

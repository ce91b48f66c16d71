"""One check process serves many sessions, and never scores one for another."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from harness.machine.process_group import is_gone
from harness.suite.judge.reward import Score, StandingCheck
from tests.session_servers.served import eventually

ANSWERS = """
import os

def answers():
    "The descriptor that the runner answers on, opened after that of the questions: a check has no business there."
    opened = (n for n in range(3, 32) if os.path.exists(f"/proc/self/fd/{n}"))
    return max(n for n in opened if os.readlink(f"/proc/self/fd/{n}").startswith(("pipe:", "socket:")))

def pid():
    return {"reward": 1, "pid": os.getpid()}
"""
ONCE = """
import pathlib
def is_first(path):
    "Whether nobody has asked for this path before."
    try:
        pathlib.Path(path).touch(exist_ok=False)
        return True
    except FileExistsError:
        return False
"""


@asynccontextmanager
async def _standing(tmp_path: Path, body: str, *, deadline_s: float = 60) -> AsyncIterator[StandingCheck]:
    (tmp_path / "check.py").write_text(ANSWERS + ONCE + body)
    async with StandingCheck(tmp_path / "check.py", deadline_s=deadline_s) as standing:
        yield standing


async def _ask(standing: StandingCheck, n: int) -> Score:
    return await standing.score({"turns": []}, {"n": n}, {})


async def test_one_process_scores_every_session(tmp_path: Path):
    """Each with its own numbers, in whatever order they came."""
    body = "def score(session, result, metadata):\n    return {'reward': result['n'], 'pid': os.getpid()}"
    async with _standing(tmp_path, body) as standing:
        scores = await asyncio.gather(*(_ask(standing, n) for n in range(20)))

    assert [score.reward for score in scores] == list(range(20))
    assert len({score.details["pid"] for score in scores}) == 1


async def test_nothing_in_the_globals_of_a_check_outlives_a_session(tmp_path: Path):
    """The file is run anew for each, as in a process of its own."""
    async with _standing(tmp_path, "seen = []\ndef score(*_):\n    seen.append(1)\n    return len(seen)") as standing:
        assert [(await _ask(standing, n)).reward for n in range(3)] == [1, 1, 1]


@pytest.mark.parametrize(
    "misdeed",
    [
        "print('garbage'); os.write(1, b'more of it\\n'); os.system('echo and more')",
        "import sys; sys.__stdout__.write('x'); sys.__stdout__.flush(); assert sys.stdin.read() == ''",
        "import sys; sys.stderr.write('x' * 300000)",
    ],
)
async def test_a_check_that_prints_is_heard_by_nobody(tmp_path: Path, misdeed: str):
    """However it prints, and much of it: the line of the answer stays clean."""
    body = f"def score(session, result, metadata):\n    {misdeed}\n    return pid() | {{'reward': result['n']}}"
    async with _standing(tmp_path, body) as standing:
        scores = [await _ask(standing, n) for n in range(3)]

    assert [(score.reward, score.error) for score in scores] == [(0, None), (1, None), (2, None)]
    assert len({score.details["pid"] for score in scores}) == 1


@pytest.mark.parametrize(
    ("misdeed", "reason"),
    [
        ("os.write(answers(), b'garbage\\n')", "expected one line as the answer, got b'garbage"),
        ('os.write(answers(), b\'{"id": "x", "score": 9}\\n\')', 'expected one line as the answer, got b\'{"id": "x"'),
        ("os.write(answers(), b'[1]\\n')", "expected one line as the answer, got b'[1]"),
        ("os.write(answers(), b'\\xff\\n')", "expected one line as the answer, got b'\\xff"),
        ("os.write(answers(), b'x' * 1200000)", "expected one line as the answer, got b'xxx"),
        ("os.close(answers())", "no score"),
        ("os._exit(3)", "ended with code 3 and no score"),
        ("import signal; os.kill(os.getpid(), signal.SIGKILL)", "ended with code -9 and no score"),
        ("import signal; signal.pause()", "gave no score within 0.2 s"),
        ("raise ValueError('bad')", "ValueError: bad"),
    ],
)
def test_a_session_whose_check_fails_is_the_only_one(tmp_path: Path, misdeed: str, reason: str):
    """It gets the reason; those before and after it get their own scores. On uvloop; `test_scoring` is on the other."""
    body = f"def score(session, result, metadata):\n    if result['n'] == 1:\n        {misdeed}\n    return result['n']"

    async def score() -> list[Score]:
        scores = []
        async with _standing(tmp_path, body) as standing:
            for n in (0, 1, 2):
                standing._deadline_s = 0.2 if n == 1 and "pause" in misdeed else 60
                scores.append(await _ask(standing, n))
        return scores

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        scores = runner.run(score())

    assert [score.reward for score in scores] == [0, None, 2]
    assert reason in (scores[1].error or "")


@pytest.mark.parametrize("when", ["between the sessions", "while the next one is scored"])
async def test_what_a_session_leaves_behind_costs_the_next_one_nothing(tmp_path: Path, when: str):
    """Output that no question asked for, whenever it comes: the next session is scored by a new process."""
    body = """
import threading, time
def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.01)

def say_later(go, said, answers=answers):
    wait_for(go)
    os.write(answers(), b'{"id": "0", "score": 9}\\n')
    is_first(said)

def score(session, result, metadata):
    if result["n"] == 0:
        threading.Thread(target=say_later, args=(metadata["go"], metadata["said"]), daemon=True).start()
    elif metadata["in_score"] and is_first(metadata["go"]):
        wait_for(metadata["said"])
    return pid()
"""
    go, said = tmp_path / "go", tmp_path / "said"
    metadata = {"go": str(go), "said": str(said), "in_score": when == "while the next one is scored"}
    async with _standing(tmp_path, body) as standing:
        first = await standing.score({}, {"n": 0}, metadata)
        if not metadata["in_score"]:
            go.touch()
            await eventually(said.exists)
        second = await standing.score({}, {"n": 1}, metadata)

    assert [first.reward, second.reward] == [1, 1]
    assert first.details["pid"] != second.details["pid"]


async def test_a_process_that_has_died_meanwhile_is_replaced(tmp_path: Path):
    async with _standing(tmp_path, "def score(*_):\n    return pid()") as standing:
        first = (await _ask(standing, 0)).details["pid"]
        os.kill(first, 9)
        second = await _ask(standing, 1)

    assert second.reward == 1
    assert second.details["pid"] != first


async def test_a_question_that_is_given_up_is_never_answered(tmp_path: Path):
    """Its process ends with it, so its answer is not there for the session that comes next."""
    asked = tmp_path / "asked"
    body = f"""
import time
def score(session, result, metadata):
    if result["n"]:
        is_first({str(asked)!r})
        time.sleep(60)
    return pid()
"""
    async with _standing(tmp_path, body) as standing:
        first = (await _ask(standing, 0)).details["pid"]
        given_up = asyncio.create_task(_ask(standing, 1))
        await eventually(asked.exists)
        given_up.cancel()
        await asyncio.wait({given_up})
        after = await _ask(standing, 0)

    assert given_up.cancelled()
    assert after.reward == 1
    assert after.details["pid"] != first


async def test_nothing_is_left_of_a_check(tmp_path: Path):
    """Neither the process nor what it has started, once the block is left."""
    body = """
import subprocess
def score(*_):
    return {**pid(), "child": subprocess.Popen(["sleep", "60"]).pid}
"""
    async with _standing(tmp_path, body) as standing:
        pids = (await _ask(standing, 0)).details

    assert pids["pid"] != pids["child"]
    assert is_gone(pids["pid"])

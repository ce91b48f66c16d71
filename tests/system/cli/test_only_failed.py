"""`harness run --resume --only failed`: what failed is played again, and nothing else."""

import json
import sqlite3
from collections import Counter
from pathlib import Path

import pytest

from harness.suite.record.config import Overrides
from harness.suite.record.rollout_table import REPLAYED, read_rollouts
from harness.suite.run.interrupts import Interrupts
from harness.suite.run.open_run import FailedOnly, resume_run
from harness.suite.run.read_run import read_run
from harness.suite.run.report import RunReport, RunStatus
from harness.suite.run.runner import SuiteRun
from tests.harness_command import harness, write_scenario
from tests.played_suites import Silence, play
from tests.recorded_runs import write_run

PLAY = '''
"""Asks once, and raises unless the file of its metadata is there."""

from pathlib import Path

import aiohttp


async def run(base_url, prompt, request_kwargs, metadata, api_key, **kwargs):
    body = {**request_kwargs, "messages": [{"role": "user", "content": prompt}]}
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {api_key}"}) as client:
        async with client.post(f"{base_url}/chat/completions", json=body) as response:
            await response.json()
    if not Path(metadata["needs"]).exists():
        raise ValueError("it is not there")
    return {"turns": 1}
'''


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    """Two sessions that end well and two that crash until `tmp_path / "mended"` exists."""
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "play.py").write_text(PLAY)
    prompts = [{"metadata": {"needs": str(tmp_path / name)}} for name in ("s", "mended")]
    return write_scenario(tmp_path / "s", agent={"function": "play.py:run"}, prompts=prompts)


async def _play_again(run: Path, numbers: frozenset[int] | None) -> RunReport:
    opened = resume_run(str(run), Overrides(), None)
    return await SuiteRun(opened.selection, opened.directory, Silence(), Interrupts(), only=numbers).execute()


def _attempts(run: Path) -> Counter[int]:
    with sqlite3.connect(run / "run.db") as connection:
        counts = Counter[int](number for [number] in connection.execute("SELECT number FROM rollouts"))
    connection.close()
    return counts


async def test_only_the_failed_rollouts_are_played_again(folder: Path, tmp_path: Path):
    """Their records of before are kept, their tokens are `replayed`, and the report is that of a complete run."""
    run = tmp_path / "run"
    before = await play(folder, run)
    first = {number: record.session_id for number, record in read_rollouts(run / "run.db").items()}
    (tmp_path / "mended").touch()
    opened = resume_run(str(run), Overrides(), None)
    failed = FailedOnly.parse("failed:crashed").find(opened.directory)
    after = await _play_again(run, failed)
    [scenario] = after.scenarios
    again = {record.number for record in scenario.records if record.session_id != first[record.number]}

    assert before.scenarios[0].outcomes == {"finished": 2, "crashed": 2}
    assert (failed, again) == ({2, 3}, {2, 3})
    assert scenario.outcomes == {"finished": 4}
    assert (after.status, scenario.replayed, before.scenarios[0].replayed) == (RunStatus.PASSED, 2, 0)
    assert _attempts(run) == {0: 1, 1: 1, 2: 2, 3: 2}
    assert after.ledger.difference == 0
    assert after.ledger.dropped == {REPLAYED: before.scenarios[0].records[2].ledger.generated * 2}
    assert read_run(run).ledger == after.ledger
    assert json.loads((run / "result.json").read_text())["scenarios"][0]["replayed"] == 2
    assert len((run / "samples.jsonl").read_text().splitlines()) == 4


async def test_a_replay_that_stops_half_way_is_taken_up(folder: Path, tmp_path: Path):
    """What was not played again keeps its record, and a resume without `--only` completes the report."""
    run = tmp_path / "run"
    await play(folder, run)
    (tmp_path / "mended").touch()
    await _play_again(run, frozenset({2}))
    (run / "result.json").unlink()  # as a replay leaves it that is killed before its next rollout ends
    after = await _play_again(run, None)

    assert after.status is RunStatus.PASSED
    assert after.scenarios[0].outcomes == {"finished": 3, "crashed": 1}
    assert _attempts(run) == {0: 1, 1: 1, 2: 2, 3: 1}


async def test_rollouts_that_never_ran_stay_unfinished(folder: Path, tmp_path: Path):
    """Of a half finished run `--only` plays what failed, and the run still is to be resumed."""
    run = tmp_path / "run"
    await play(folder, run)
    with sqlite3.connect(run / "run.db") as connection:
        connection.execute("DELETE FROM rollouts WHERE number = 1")
    connection.close()
    after = await _play_again(run, frozenset({3}))

    assert after.status is RunStatus.INTERRUPTED
    assert [record.number for record in after.scenarios[0].records] == [0, 2, 3]
    assert not (run / "result.json").exists()


async def test_the_command_says_what_it_does_not_play(tmp_path: Path):
    """A cause that there is not, a run at work elsewhere, no --resume: code 4; nothing to play: 0. No file changes."""
    write_scenario(tmp_path / "small")
    directory = await write_run(tmp_path / "run", [("Two.", 1.0), ("Two.", None)])
    result = directory.result.read_bytes()
    resume = ("run", directory.path, "--resume", "--only")
    unknown = harness(*resume, "failed:agent_crashed")
    with directory.occupy():
        elsewhere = harness(*resume, "failed")
    nothing = harness(*resume, "failed:engine")
    anew = harness("run", tmp_path / "small", "--only", "failed")

    assert [ended.code for ended in (unknown, elsewhere, anew)] == [4, 4, 4]
    assert "got agent_crashed; those of this run: crashed (1), agent (1)" in unknown.stderr
    assert "another process uses the run" in elsewhere.stderr
    assert (nothing.code, "nothing to rerun" in nothing.stderr) == (0, True)
    assert "add --resume" in anew.stderr
    assert directory.result.read_bytes() == result

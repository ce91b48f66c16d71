"""A run that is stopped, killed or starved of disk leaves a readable directory, and takes up where it stopped."""

import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from harness.server.store.sqlite import list_sessions, read_session
from harness.suite.record.rollout_table import read_rollouts
from tests.harness_command import harness, make_quick, start_harness, wait, wait_for, write_scenario
from tests.session_servers.store_file import read_file
from tests.small_disk import small_disk

pytestmark = pytest.mark.agent

QUICK_THEN_SLOW = [{"metadata": {"turns": 2}}, {"metadata": {"turns": 400, "pause_s": 0.1}}]


@pytest.fixture(name="scenario")
def _scenario(tmp_path: Path) -> Path:
    """Two sessions that end at once, then two that continue for long."""
    return write_scenario(tmp_path / "s", prompts=QUICK_THEN_SLOW)


def _start_until_slow(scenario: Path, run: Path) -> subprocess.Popen[str]:
    """A run whose quick sessions are recorded and whose slow ones are in the middle of their work."""
    process = start_harness("run", scenario, "--out", run, "-n", "2")
    for number in (2, 3):
        wait_for(run / "sessions" / str(number) / "agent.log", "Two and more.")
    return process


def _resume(run: Path) -> dict[str, object]:
    ended = harness("run", run, "--resume", "--json")
    assert ended.code == 0, ended.stderr
    assert "run was interrupted: 2 of 4 rollouts finished" in ended.stderr
    document: dict[str, object] = ended.document
    return document


def _assert_resumed_well(run: Path, before: dict[int, str | None]) -> None:
    """Finished sessions are those of before, the others continued from their records, and no token is lost."""
    result = json.loads((run / "result.json").read_text())
    after = {number: record.session_id for number, record in read_rollouts(run / "run.db").items()}
    ledger = result["ledger"]
    sampled = sum(stored.sampled for stored in list_sessions(run / "run.db").values())
    samples = (run / "samples.jsonl").read_text().splitlines()
    notes = [
        [turn.notes.inherited for turn in read_session(run / "run.db", after[number] or "").turns] for number in (2, 3)
    ]

    assert {number: after[number] for number in (0, 1)} == {number: before[number] for number in (0, 1)}
    assert sorted(after) == [0, 1, 2, 3]
    assert (ledger["generated"], ledger["difference"]) == (sampled, 0)
    assert [inherited[0] for inherited in notes] == ["trained", "trained"]
    assert ledger["trained"] == sum(sum(json.loads(line)["loss_mask"]) for line in samples)
    assert "interrupted" not in ledger["dropped"]
    assert len(samples) == 4


def _sessions(run: Path) -> dict[int, str | None]:
    return {number: record.session_id for number, record in read_rollouts(run / "run.db").items()}


def _agents_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if any(part.endswith("agent.py") for part in child.cmdline())]


def test_a_killed_run_is_taken_up(scenario: Path, tmp_path: Path):
    """`kill -9` at work: what had finished is not run again, nothing of the killed run is left."""
    run = tmp_path / "run"
    process = _start_until_slow(scenario, run)
    agents = _agents_of(process)
    process.kill()
    wait(process)
    _, alive = psutil.wait_procs(agents, timeout=60)
    before = _sessions(run)

    assert len(agents) == 2
    assert alive == []
    assert sorted(before) == [0, 1]
    assert not (run / "result.json").exists()
    (run / "sessions" / "2" / "half-done").touch()
    make_quick(scenario, run)
    _resume(run)
    _assert_resumed_well(run, before)
    assert not (run / "sessions" / "2" / "half-done").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_interrupt_drains(scenario: Path, tmp_path: Path, number: signal.Signals):
    """Agents stop at their next model call; exit code 2, and the command that continues."""
    run = tmp_path / "run"
    process = _start_until_slow(scenario, run)
    before = _sessions(run)
    process.send_signal(number)
    ended = wait(process)

    assert ended.code == 2, ended.stderr
    assert ended.stderr.splitlines()[-1] == f"resume with: harness run {run} --resume"
    assert "INTERRUPTED" in ended.stdout
    assert {record.outcome for record in read_rollouts(run / "run.db").values()} == {"finished", "drained"}
    assert not (run / "result.json").exists()
    make_quick(scenario, run)
    _resume(run)
    _assert_resumed_well(run, before)


def test_two_interrupts_kill_agents_that_do_not_listen(tmp_path: Path):
    """One that never calls the model again and ignores SIGTERM is gone within seconds."""
    program = (
        "# /// script\n# requires-python = '>=3.11'\n# ///\nimport signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\ntime.sleep(300)\n"
    )
    run = tmp_path / "run"
    process = start_harness("run", write_scenario(tmp_path / "s", program=program), "--out", run, "-n", "1")
    wait_for(run / "sessions" / "0" / "agent.log", "deaf")
    agents = _agents_of(process)
    process.send_signal(signal.SIGINT)
    while "open" in {session.phase for session in read_file(run / "run.db").values()}:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    ended = wait(process)

    assert ended.code == 2, ended.stderr
    assert "resume with:" in ended.stderr
    assert agents
    assert psutil.wait_procs(agents, timeout=60)[1] == []


def test_a_full_disk_is_said_and_the_directory_stays_readable(tmp_path: Path):
    """One clear line, exit code 6; what had finished is still there, and the run continues when there is space."""
    long = {"steps": [{"text": "word " * 400}]}
    scenario = write_scenario(
        tmp_path / "s", script=long, prompts=[{"metadata": {"turns": 3}}, {"metadata": {"turns": 12}}]
    )
    bigger = tmp_path / "bigger"
    with small_disk(tmp_path / "disk", megabytes=1) as disk:
        ended = harness("run", scenario, "--out", disk / "run", "-n", "1")
        finished = len(read_rollouts(disk / "run" / "run.db"))
        shutil.copytree(disk / "run", bigger)
    is_complete = (bigger / "result.json").exists()
    resumed = harness("run", bigger, "--resume")

    assert ended.code == 6, ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("harness: No space left on device: ")
    assert last.endswith("free some space, then resume the run")
    assert ("Traceback" in ended.stderr, is_complete, finished < 4) == (False, False, True)
    assert resumed.code == 0, resumed.stderr
    assert f"run was interrupted: {finished} of 4 rollouts finished" in resumed.stderr


def test_output_that_nobody_reads_is_no_error(tmp_path: Path):
    """`harness scenario schema | head -1` does not end in a traceback."""
    command = f"{shlex.quote(sys.executable)} -m harness scenario schema | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, cwd=tmp_path)

    assert done.stderr == ""

"""A run directory is read back whole, whatever state it is in, and reading leaves it as it was."""

import os
import shutil
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from hashlib import sha256
from pathlib import Path

import pytest

from harness import HarnessError, OutcomeKind, errors, read_run, read_samples
from harness.suite.record.rundir import RunDirectory
from tests.harness_command import harness, start_harness, wait, wait_for, write_scenario
from tests.unit.test_notebook import Seen, is_plain

pytestmark = pytest.mark.xdist_group("read-run")  # played once, on one worker


@pytest.fixture(name="complete", scope="module")
def _complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two groups of two sessions that has passed; not to be changed."""
    home = tmp_path_factory.mktemp("complete")
    ended = harness("run", write_scenario(home / "small"), "--out", home / "run")
    assert ended.code == 0, ended.stderr
    return home / "run"


@pytest.fixture(name="copy")
def _copy(complete: Path, tmp_path: Path) -> RunDirectory:
    """The same run, to be damaged."""
    return RunDirectory(Path(shutil.copytree(complete, tmp_path / "copy")))


def _contents(directory: Path) -> dict[str, str]:
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return {str(path): sha256(path.read_bytes()).hexdigest() for path in files if path.suffix != ".db-shm"}


def test_a_complete_run_is_what_its_files_say(complete: Path) -> None:
    run = read_run(complete)
    report = RunDirectory(complete).read_result()

    assert run.status == report["status"] == "passed"
    assert [rollout.number for rollout in run.rollouts] == [0, 1, 2, 3]
    assert [rollout.reward for rollout in run.rollouts] == [0.2, 0.2, 0.3, 0.3]
    assert run.outcomes == {OutcomeKind.FINISHED: 4}
    assert run.ledger.to_json() | {"difference": 0} == report["ledger"]
    exported = read_samples(complete / "samples.jsonl")
    assert len(run.samples) == len(exported) == 4
    assert [(each.index, each.group_index, each.reward) for each in run.samples] == [
        (0, 0, 0.2), (1, 0, 0.2), (2, 1, 0.3), (3, 1, 0.3)
    ]  # fmt: skip
    for ours, theirs in zip(run.samples, exported, strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert ours.metadata == theirs.metadata
    assert run.ledger.trained == sum(int(sample.loss_mask.sum()) for sample in run.samples)


def test_a_run_shows_itself_in_a_notebook(complete: Path) -> None:
    """Its end, its mean reward, its tokens, and a row for each rollout."""
    seen = Seen(read_run(complete)._repr_html_())

    assert is_plain(seen)
    assert "Run: passed" in seen.text
    assert "mean reward  0.250" in seen.text
    assert seen.parts.count("finished") == 4


def test_reading_changes_nothing(complete: Path) -> None:
    """No lock, no file, no folded log: somebody else may be at work in it."""
    before = _contents(complete)
    with RunDirectory(complete).occupy():
        read_run(str(complete))
    assert _contents(complete) == before


@pytest.fixture(name="halted", scope="module")
def _halted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunDirectory]:
    """A run that continues: its first rollout has ended, the second waits for longer than the tests last."""
    home = tmp_path_factory.mktemp("halted")
    scenario = write_scenario(
        home / "slow",
        samples_per_prompt=1,
        concurrency=1,
        prompts=[{"metadata": {"turns": 2}}, {"metadata": {"turns": 2, "pause_s": 600}}],
        agent={"profile": "agent.py", "deadline_s": 900.0},
    )
    with start_harness("run", scenario, "--out", home / "run") as process:
        try:
            wait_for(home / "run" / "sessions" / "1" / "agent.log", "assistant>")
            yield RunDirectory(home / "run")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            wait(process)


def test_a_run_that_goes_on_and_one_that_was_killed_give_what_is_there(halted: RunDirectory) -> None:
    """The rollout that has ended counts; the tokens of the one that has not are `interrupted`."""
    run = read_run(halted.path)

    assert run.status is None
    assert [rollout.number for rollout in run.rollouts] == [0]
    assert [sample.index for sample in run.samples] == [0]
    assert run.ledger.difference == 0
    assert run.ledger.dropped["interrupted"] > 0
    assert run.ledger.trained == sum(int(sample.loss_mask.sum()) for sample in run.samples)


def test_the_log_of_a_killed_run_stays_where_it_is(halted: RunDirectory, tmp_path: Path) -> None:
    """A copy that has nobody at work in it any more reads the same, and is left as it was."""
    killed = Path(shutil.copytree(halted.path, tmp_path / "killed"))
    before = _contents(killed)

    assert [rollout.number for rollout in read_run(killed).rollouts] == [0]
    assert _contents(killed) == before
    assert (killed / "run.db-wal").stat().st_size > 0


def test_a_run_that_was_killed_before_its_first_session_is_empty(copy: RunDirectory) -> None:
    for path in (copy.database, copy.result):
        path.unlink()
    run = read_run(copy.path)

    assert (run.status, run.rollouts, list(run.samples), dict(run.outcomes)) == (None, (), [], {})
    assert run.ledger.generated == 0


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda run: run.config.unlink(), errors.RunError, "is not a run directory: it has no config.toml"),
        (lambda run: run.result.write_text("{"), errors.RunError, "result.json: expected the report of a run"),
        (
            lambda run: run.result.write_text('{"status": "fine", "exit_code": 0}'),
            errors.RunError,
            "result.json: status: expected one of passed, .*, got 'fine'",
        ),
        (lambda run: run.database.unlink(), errors.RunError, "a complete run without its run.db"),
        (lambda run: run.database.write_bytes(b"x" * 4096), errors.StoreError, "run.db: file is not a database"),
        (lambda run: _change(run, "UPDATE rollouts SET record = '{}'"), errors.StoreError, "run.db: a row of rollouts"),
        (lambda run: _change(run, "PRAGMA user_version = 999"), errors.StoreError, "written by a newer harness"),
        (lambda run: _change(run, "DELETE FROM turns"), errors.LedgerImbalance, "the store holds 0 sampled tokens"),
    ],
)
def test_a_damaged_run_is_one_clear_error(copy: RunDirectory, damage, error: type[HarnessError], message: str) -> None:
    """It names the file and what is wrong with it."""
    damage(copy)
    with pytest.raises(error, match=message):
        read_run(copy.path)


def _change(run: RunDirectory, statement: str) -> None:
    with closing(sqlite3.connect(run.database)) as connection, connection:
        connection.execute(statement)

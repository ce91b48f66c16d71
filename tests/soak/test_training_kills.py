"""A training run that is killed again and again: every trained token is in one committed step, and nothing is left.

The process dies by SIGKILL at a random moment, or just before a random change of a file in its directory, and is
started again with `--resume`. The scripted learner's weights are a digest of every pack of every step, in order, so
they say whether an update was lost or made twice. `HARNESS_SOAK_KILLS` says how many deaths; `make soak` asks for more
than `make test`.
"""

import asyncio
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from harness.sessions.ledger import Ledger, total
from harness.suite.exits import ExitCode
from harness.training.collector.record.step_record import StepRecord, pack_again
from harness.training.collector.record.step_table import StepTable, read_step
from harness.training.collector.segment_maker import SegmentMaker
from tests.checkout import ROOT
from tests.session_servers.served import eventually
from tests.soak.train_scenario import TRAIN, write_train_scenario
from tests.trained_scenario import write_real_scenario

KILLS = int(os.environ.get("HARNESS_SOAK_KILLS", "4"))
STEPS = 12
PROGRAM = Path(__file__).with_name("train_to_death.py")
LONGEST_LIFE_S = 6.0
MOST_CHANGES = 120
KINDS: Mapping[str, Mapping[str, Any]] = {
    "on-policy": {},
    "groups continue": {"max_staleness": 2, "partial": "resume", "order": "arrival"},
}


@dataclass
class Training:
    """A run that ends early again and again."""

    folder: Path
    dice: random.Random
    steps: int = STEPS
    deaths: int = 0

    def start(self, last_change: int) -> subprocess.Popen[bytes]:
        """A process that makes less than `last_change` changes of files in the run directory."""
        begins = not (self.folder / "config.toml").exists()
        if begins:  # a run that has died before it had one has nothing to continue from
            shutil.rmtree(self.folder, ignore_errors=True)
        what = [str(self.folder.parent / "game"), "--out"] if begins else []
        arguments = ["train", *what, str(self.folder), "--steps", str(self.steps), *([] if begins else ["--resume"])]
        return subprocess.Popen(
            [sys.executable, str(PROGRAM), str(self.folder), str(last_change), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            start_new_session=True,
        )

    async def live(self) -> bool:
        """One life; whether it was the last one."""
        by_change = self.dice.random() < 0.7
        process = self.start(self.dice.randrange(1, MOST_CHANGES) if by_change else 0)
        assert process.stdout is not None
        if not by_change:
            await asyncio.to_thread(process.stdout.readline)  # it has been imported, and starts its engine
        try:
            said, _ = await asyncio.to_thread(
                process.communicate, timeout=300 if by_change else self.dice.uniform(0, LONGEST_LIFE_S)
            )
        except subprocess.TimeoutExpired:
            assert not by_change, "the run hangs"
            process.kill()
            said, _ = process.communicate()
        if process.returncode == 0:
            return True
        assert process.returncode == -signal.SIGKILL, said.decode()[-3000:]
        self.deaths += 1
        await eventually(lambda: not processes_about(self.folder.parent))
        return False

    async def to_its_end(self) -> None:
        """One last life, in which nobody dies."""
        process = self.start(0)
        said, _ = await asyncio.to_thread(process.communicate, timeout=300)
        assert process.returncode == 0, said.decode()[-3000:]

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """What stands in its database."""
        with closing(sqlite3.connect(self.folder / "run.db")) as connection:
            return connection.execute(sql).fetchall()

    def lines(self, name: str) -> list[bytes]:
        """The lines of one of its files."""
        return (self.folder / name).read_bytes().splitlines()


def processes_about(folder: Path) -> dict[int, str]:
    """The commands of all processes that name `folder`, by their ids; tests are none of them."""
    found = {}
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = each.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has just ended
            continue
        if str(folder) in command and "pytest " not in command:
            found[int(each.parent.name)] = command
    return found


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_training_run_that_is_killed_trains_everything_once(kind: str, tmp_path: Path):
    """Run after run, until there have been enough deaths."""
    dice = random.Random(7)
    deaths = 0
    while deaths < KILLS // len(KINDS):
        folder = tmp_path / f"after-{deaths}"
        write_train_scenario(folder / "game", **KINDS[kind])
        training = Training(folder / "run", dice)
        while training.deaths + deaths < KILLS // len(KINDS) and not await training.live():
            pass
        await training.to_its_end()
        check_books(training, STEPS * TRAIN["rollouts_per_step"])
        check_weights(training)
        check_packs(training, KINDS[kind].get("max_staleness", 0))
        check_leftovers(training)
        deaths += max(training.deaths, 1)


@pytest.mark.skipif(KILLS < 20, reason="takes minutes where two cores are shared; `make soak` has it")
@pytest.mark.timeout(1200)
async def test_an_engine_that_is_killed_ends_the_run_and_costs_no_step(tmp_path: Path):
    """The local engine, a process of its own, dies while a step is collected: the run ends in words, and continues."""
    write_real_scenario(tmp_path / "game")
    training = Training(tmp_path / "run", random.Random(0), steps=3)
    process, telemetry = training.start(0), tmp_path / "run" / "telemetry.jsonl"
    try:
        async with asyncio.timeout(300):
            while not (telemetry.exists() and telemetry.stat().st_size):
                assert process.poll() is None
                await asyncio.sleep(0.02)
        engine = processes_about(tmp_path / "weights")
        assert engine, processes_about(tmp_path)
        for pid in engine:
            os.kill(pid, signal.SIGKILL)
        said, _ = await asyncio.to_thread(process.communicate, timeout=300)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == ExitCode.INFRASTRUCTURE, said.decode()[-3000:]
    assert b"resume with: harness train" in said
    await eventually(lambda: not processes_about(tmp_path))

    await training.to_its_end()

    check_books(training, 3 * 4)
    assert not processes_about(tmp_path)


def check_books(training: Training, rollouts: int) -> None:
    """Every rollout is trained by one step at most, and the ledger of the run is the sum of theirs."""
    records = [StepRecord.read(line) for line in training.lines("steps.jsonl")]
    trained = [each for record in records for each in record.rollouts if each.use == "delivered"]
    assert [record.step for record in records] == list(range(training.steps))
    assert (
        len({each.session_id for each in trained}) == len({each.index for each in trained}) == len(trained) == rollouts
    )
    assert all(record.ledger.difference == 0 for record in records)
    with StepTable(training.folder / "run.db") as table:
        assert table.position == (training.steps, total(record.ledger for record in records))
        ledger: Ledger = table.close_books()
    figures = [json.loads(line) for line in training.lines("telemetry.jsonl")]
    assert len(figures) == training.steps
    assert ledger.trained == sum(each["train/trained_tokens"] for each in figures)
    assert ledger.difference == 0


def check_weights(training: Training) -> None:
    """The learner has been updated by each step once, in order."""
    weights = ""
    for line in training.lines("steps.jsonl"):
        record = StepRecord.read(line)
        told = json.dumps([weights, [pack.digest for pack in record.packs], record.normalizer])
        weights = blake2b(told.encode(), digest_size=16).hexdigest()
    [state] = (training.folder / "state").iterdir()
    assert json.loads((state / "scripted_learner.json").read_text()) == {"step": STEPS, "weights": weights}


def check_packs(training: Training, max_staleness: int) -> None:
    """The steps that are kept are packed again, digest for digest."""
    maker = SegmentMaker(TRAIN["packing"]["length"], max_staleness=max_staleness)
    for step in (STEPS - 2, STEPS - 1):
        record, rollouts = read_step(training.folder / "run.db", step)
        packs = pack_again(record, rollouts, maker)
        assert [pack.digest() for pack in packs] == [pack.digest for pack in record.packs]


def check_leftovers(training: Training) -> None:
    """No process, no session that is open, nothing of steps that are over or did not happen."""
    assert not processes_about(training.folder)
    assert training.query("SELECT COUNT(*) FROM sessions WHERE phase != 'closed'") == [(0,)]
    assert training.query("SELECT step, state FROM steps") == [(step, "committed") for step in (STEPS - 2, STEPS - 1)]
    [(pages,)], [(free,)] = training.query("PRAGMA page_count"), training.query("PRAGMA freelist_count")
    assert pages <= 2 * (pages - free), "the database is twice as large as what it keeps"
    assert [each.name for each in (training.folder / "checkpoints").iterdir()] == [str(STEPS)]

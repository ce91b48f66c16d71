"""Two runs, and two sessions, side by side: what differs, and the first token of it."""

import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.cli.look.reports import diff
from harness.errors import RunError
from harness.server.store.sqlite import read_session
from harness.sessions.record import RecordIds, session_record
from harness.suite.record.attached_sessions import AttachedSessions
from harness.suite.record.rundir import RunDirectory
from harness.types import Json
from harness.viewer.diff import SessionPair, _keyed, compare_rewards
from harness.viewer.look import look_at
from harness.viewer.run_view import SessionLine
from tests.recorded_runs import write_run

Runs = tuple[RunDirectory, RunDirectory]
HOSTILE = "Two \x1b[2J\u202e."


@pytest.fixture(name="runs")
async def _runs(tmp_path: Path) -> Runs:
    """Two runs with the same seeds: the second rollout says something else, the last one has no partner."""
    first = await write_run(tmp_path / "first", [("Two.", 0.0), ("Two and more.", 0.5), ("Two.", None), ("Two.", 1.0)])
    second = await write_run(tmp_path / "second", [("Two.", 1.0), (HOSTILE, 0.5), ("Two.", 1.0)])
    return first, second


def _compare(capsys: pytest.CaptureFixture[str], *what: Path | str, **options: Any) -> Json:
    capsys.readouterr()  # what the servers said that wrote the runs
    diff([str(each) for each in what], as_json=True, **options)
    document: Json = json.loads(capsys.readouterr().out)
    return document


def test_two_runs_are_paired_by_prompt_and_place(runs: Runs, capsys: pytest.CaptureFixture[str]):
    """Outcomes, rewards of the pairs that have two, tokens, and what each has alone."""
    found = _compare(capsys, *(run.path for run in runs))

    assert found["outcomes"] == {"crashed": [1, 0], "finished": [3, 3]}
    assert (found["rewards"]["pairs"], found["rewards"]["means"]) == (2, [0.25, 0.75])
    assert found["rewards"]["difference"] == 0.5
    assert found["alone"] == [1, 0]
    assert [ledger["generated"] for ledger in found["ledgers"]] == found["tokens"]
    assert [(pair["first"]["number"], pair["second"]["number"]) for pair in found["pairs"]] == [(0, 0), (1, 1), (2, 2)]


def test_the_first_token_that_differs_has_both_texts(runs: Runs, capsys: pytest.CaptureFixture[str]):
    """The turn, the part of it, the position, and what each said there; equal sessions do not part."""
    pairs = _compare(capsys, *(run.path for run in runs))["pairs"]

    assert [pair["divergence"] is None for pair in pairs] == [True, False, True]
    assert all(pair["compared"] for pair in pairs)
    parting = pairs[1]["divergence"]
    assert (parting["turn"], parting["part"]) == (1, "output")
    assert parting["texts"] == ["Two and more.<|im_end|>", f"{HOSTILE}<|im_end|>"]


def test_two_sessions_are_compared_by_name(runs: Runs, capsys: pytest.CaptureFixture[str]):
    """Of two runs or of one; one that says as much as another and continues is parted from it where that ends."""
    first, second = (run.path for run in runs)
    assert _compare(capsys, first, "0", second, "2")["pair"]["divergence"] is None
    parting = _compare(capsys, first, "0", first, "1")["pair"]["divergence"]
    assert parting["turn"] == 1
    assert parting["token_ids"][0] != parting["token_ids"][1]

    diff([str(first), "0", str(first), "1"])
    assert "part in turn 1, output" in capsys.readouterr().out


def test_a_page_has_both_runs_and_their_pairs(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Of two runs each pair; of two sessions those alone, of one run too."""
    first, second = (run.path for run in runs)
    partners = []
    for what in ((first, second), (first, "0", first, "1")):
        _compare(capsys, *what, out=tmp_path / "diff.html")
        page = (tmp_path / "diff.html").read_text("ascii")
        [data] = re.findall(r'<script type="application/json" id="run">(.*)</script>', page)
        partners.append([line.get("partner") for line in json.loads(data)["sessions"]])

    assert partners == [[4, 5, 6, None, 0, 1, 2], [1, 0]]


async def test_runs_without_a_common_seed_are_paired_by_position(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Each with the one at the same place of the same prompt."""
    first = await write_run(tmp_path / "first", [("Two.", 0.0), ("Two.", 0.5)])
    second = await write_run(tmp_path / "second", [("Two.", 1.0), ("Two.", 0.5)], seed=100)

    pairs = _compare(capsys, first.path, second.path)["pairs"]
    assert [(pair["first"]["number"], pair["second"]["number"]) for pair in pairs] == [(0, 0), (1, 1)]


def test_a_killed_run_is_paired_by_what_it_has(runs: Runs, capsys: pytest.CaptureFixture[str]):
    """A rollout that has no row does not shift the others."""
    with closing(sqlite3.connect(runs[1].database)) as connection:
        connection.execute("DELETE FROM rollouts WHERE number = 0")
        connection.commit()
    runs[1].result.unlink()

    found = _compare(capsys, *(run.path for run in runs))
    assert [pair["first"]["number"] for pair in found["pairs"] if pair["second"]["number"] is not None] == [1, 2]
    assert any("its report" in sentence for sentence in found["missing"])


def test_damage_is_said_and_the_rest_compared(runs: Runs, capsys: pytest.CaptureFixture[str]):
    """A session that cannot be read is neither equal nor parted; a run without a database has totals of none."""
    with closing(sqlite3.connect(runs[1].database)) as connection:
        connection.execute("UPDATE turns SET messages_delta = '[5' WHERE turn = 1")
        connection.commit()
    found = _compare(capsys, *(run.path for run in runs))
    assert not any(pair["compared"] for pair in found["pairs"])
    assert any("where rollout 0 and rollout 0 part" in sentence for sentence in found["missing"])
    assert found["rewards"]["pairs"] == 2

    runs[1].database.unlink()
    diff([str(run.path) for run in runs])
    assert "missing: " in capsys.readouterr().out


def test_sessions_without_their_tokens_are_not_called_the_same(runs: Runs, capsys: pytest.CaptureFixture[str]):
    """Those of a server that is gone have a conversation and lengths; that is said, and is no damage."""
    session_id = look_at(runs[1].path).find("0").session_id
    assert session_id is not None
    record = session_record(read_session(runs[1].database, session_id), RecordIds.NONE)
    with AttachedSessions(runs[1].database) as attached:
        attached.keep(session_id, record)

    found = _compare(capsys, *(run.path for run in runs))
    assert [pair["compared"] for pair in found["pairs"]] == [False, True, True]
    [sentence] = [each for each in found["missing"] if "rollout 0" in each]
    assert "tokens of turn 0 are not here" in sentence
    assert "damaged" not in sentence


def test_nothing_hostile_reaches_the_terminal(runs: Runs, capsys: pytest.CaptureFixture[str]):
    capsys.readouterr()  # what the servers said that wrote the runs
    diff([str(run.path) for run in runs])

    out = capsys.readouterr().out
    assert [char for char in out if not char.isprintable() and char != "\n"] == []
    assert "\\x1b" in out


@pytest.mark.parametrize("what", [["a"], ["a", "0", "b"], ["a", "b", "c", "d", "e"]])
def test_another_number_of_arguments_is_refused(what: list[str]):
    with pytest.raises(RunError, match="RUN SESSION RUN SESSION"):
        diff(what)


def _pair(group: int, first: float, second: float) -> SessionPair:
    lines = [SessionLine(None, scenario="s", group=group, reward=reward) for reward in (first, second)]
    return SessionPair(lines[0], lines[1], compared=False)


def test_the_interval_keeps_the_pairs_of_a_prompt_together():
    """A hundred pairs of five prompts say no more than the five prompts; four say nothing of others."""
    rewards = [0.1, 0.4, 0.2, 0.6, 0.7]  # mean 0.4, deviation 0.2550: 0.4 -+ 2.776 * 0.2550 / sqrt(5)
    for copies in (1, 20):
        spread = compare_rewards(
            [_pair(group, 0.0, reward) for group, reward in enumerate(rewards) for _ in range(copies)]
        )
        assert spread is not None
        assert (spread.pairs, spread.prompts) == (5 * copies, 5)
        assert spread.interval == pytest.approx((0.0834, 0.7166), abs=2e-3)
    few = compare_rewards([_pair(group, 0.0, float(group)) for group in range(4) for _ in range(50)])
    assert few is not None
    assert (few.difference, few.interval) == (1.5, None)
    assert compare_rewards([]) is None


@pytest.mark.parametrize("prompts", [5, 20])
@pytest.mark.parametrize("kind", ["binary", "uniform"])
def test_the_interval_has_the_true_difference_as_often_as_it_says(prompts: int, kind: str):
    """95 %, give or take what 600 draws leave open, for prompts that differ and have three pairs each."""
    random = np.random.default_rng(7)
    hits = 0
    for _ in range(600):
        pairs = []
        for group in range(prompts):
            chance = random.uniform(0.2, 0.8)
            for _ in range(3):
                drawn = random.random(2) if kind == "uniform" else random.random(2) < (chance, chance)
                pairs.append(_pair(group, float(drawn[0]), float(drawn[1]) + 0.1))
        found = compare_rewards(pairs)
        assert found is not None
        assert found.interval is not None
        hits += found.interval[0] <= 0.1 <= found.interval[1]
    assert 0.925 <= hits / 600 <= 0.98


def test_scenarios_of_a_suite_are_paired_each_in_its_own_way():
    """One of which the runs have no seed in common is paired by place, wherever in the suite it is."""

    def line(session_id: str, number: int, scenario: str, seed: int) -> SessionLine:
        return SessionLine(session_id, number=number, scenario=scenario, group=number, seed=seed)

    first = _keyed([line("a", 0, "seeded", 5), line("b", 1, "moved", 6), line("c", 2, "moved", 7)], {"seeded"})
    second = _keyed([line("d", 0, "moved", 8), line("e", 1, "moved", 9), line("f", 2, "seeded", 5)], {"seeded"})

    assert {(first[key].session_id, second[key].session_id) for key in first} == {("a", "f"), ("b", "d"), ("c", "e")}

"""A turn of a recorded session, sampled anew: the prefix comes from the record, and the run stays as it was."""

from hashlib import blake2b
from pathlib import Path

import pytest

from harness.server.store.sqlite import list_sessions, read_session
from harness.suite.record.rollout_table import read_rollouts
from harness.viewer.fork import STORE
from tests.harness_command import harness, write_scenario

CHECK = "def score(session, result, metadata):\n    return float(len(session['turns']))\n"


@pytest.fixture(name="run", scope="module")
def _run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four sessions, two or three turns each."""
    place = tmp_path_factory.mktemp("forked")
    scenario = write_scenario(place / "small")
    (scenario / "check.py").write_text(CHECK)
    assert harness("run", scenario, "--out", place / "run").code == 0
    return place / "run"


def test_a_turn_is_sampled_anew_as_often_as_asked(run: Path, tmp_path: Path) -> None:
    """Rewards, mean and interval are printed; each fork has the inherited turns and its own."""
    before = blake2b((run / "run.db").read_bytes()).digest()
    ended = harness("fork", run, "2", "--at", "1", "-n", "3", "--out", tmp_path / "forks", "--json")

    assert ended.code == 0, ended.stderr
    document = ended.document
    turns = len(read_session(run / "run.db", document["session_id"]).turns)
    assert [each["outcome"] for each in document["forks"]] == ["finished"] * 3
    assert [each["reward"] for each in document["forks"]] == [float(turns)] * 3
    assert (document["value"], document["half_width"]) == (float(turns), 0.0)
    for each in document["forks"]:
        session = read_session(tmp_path / "forks" / STORE, each["session_id"])
        assert [turn.notes.inherited for turn in session.turns] == ["masked", *[""] * (turns - 1)]
        assert session.ledger().trained == each["trained"] > 0
    assert len(list_sessions(tmp_path / "forks" / STORE)) == 4
    assert (tmp_path / "forks" / "turn-1" / "fork-2" / "agent.log").is_file()
    assert blake2b((run / "run.db").read_bytes()).digest() == before
    assert len(read_rollouts(run / "run.db")) == 4


def test_each_trained_turn_has_a_value(run: Path) -> None:
    ended = harness("values", run, "2", "-n", "2")

    assert ended.code == 0, ended.stderr
    turns = int(ended.stdout.splitlines()[-1].removeprefix("turn ").split(":")[0]) + 1
    assert ended.stdout.splitlines() == [f"turn {number}: {turns} ± 0" for number in range(turns)]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("2", "--at", "9"), 4, "no turn 9"),
        (("9", "--at", "0"), 4, "9"),
        (("2", "--at", "1", "--out", "."), 4, "not empty"),
    ],
)
def test_what_cannot_be_forked_is_named(run: Path, arguments: tuple[str, ...], code: int, said: str) -> None:
    ended = harness("fork", run, *arguments, cwd=run)

    assert ended.code == code, ended
    assert said in ended.stderr
    assert len(ended.stderr.strip().splitlines()) <= 2

"""A turn of a recorded session, resampled: the prefix comes from the record, and the run stays as it was."""

import json
import shutil
import sqlite3
from contextlib import closing
from hashlib import blake2b
from pathlib import Path

import pytest

from harness.samples.codec import read_samples
from harness.samples.rollout import OutcomeKind
from harness.server.store.sqlite import list_sessions, read_session
from harness.suite.exits import ExitCode
from harness.suite.record.rollout_table import read_rollouts
from harness.suite.record.rundir import RunDirectory
from harness.viewer.fork import STORE
from tests.harness_command import AGENT, harness, write_scenario

pytestmark = pytest.mark.xdist_group("fork")  # played once, on one worker

DRIFTS = AGENT.replace('"Go on."', '"Go on." + os.urandom(8).hex()')
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
    assert document["value"] == {"mean": turns, "low": turns, "high": turns, "forks": 3}
    for each in document["forks"]:
        session = read_session(tmp_path / "forks" / STORE, each["session_id"])
        assert [turn.notes.inherited for turn in session.turns] == ["masked", *[""] * (turns - 1)]
        assert session.ledger().trained == session.ledger().generated == each["trained"] > 0
        assert session.ledger().masked == session.ledger().inherited
    assert len(list_sessions(tmp_path / "forks" / STORE)) == 4
    samples = read_samples(tmp_path / "forks" / "samples.jsonl")
    assert [(each.index, each.group_index, each.reward) for each in samples] == [(n, 0, turns) for n in range(3)]
    assert [int(each.loss_mask.sum()) for each in samples] == [each["trained"] for each in document["forks"]]
    origin = {"session_id": document["session_id"], "turn": 1}
    assert [each.metadata["forked_from"] for each in samples] == [origin] * 3
    assert (tmp_path / "forks" / "turn-1" / "fork-2" / "agent.log").is_file()
    assert blake2b((run / "run.db").read_bytes()).digest() == before
    assert len(read_rollouts(run / "run.db")) == 4


def test_a_fork_reads_another_message_at_another_temperature(run: Path, tmp_path: Path) -> None:
    """The edit is in the record, and later turns continue from it."""
    edited = ("--temperature", "0.5", "--edit", "2=Stop. Now=here.")
    ended = harness("fork", run, "2", "--at", "1", "-n", "1", "--out", tmp_path / "forks", "--json", *edited)

    assert ended.code == 0, ended.stderr
    [fork] = ended.document["forks"]
    assert fork["difference"] is None
    session = read_session(tmp_path / "forks" / STORE, fork["session_id"])
    assert [turn.messages_delta[0]["content"] for turn in session.turns][1:] == ["Stop. Now=here.", "Go on."]
    assert [turn.parent for turn in session.turns] == [None, 0, 1]
    assert [turn.params.temperature for turn in session.turns][1:] == [0.5, 0.5]
    assert session.turn(0).params.temperature != 0.5
    forked = session.config.inherits.session_id
    family = harness("show", tmp_path / "forks" / STORE)
    words = harness("show", tmp_path / "forks" / STORE, fork["session_id"])
    compared = harness("diff", run, forked, tmp_path / "forks" / STORE, fork["session_id"])
    assert [line.split()[:4] for line in family.stdout.split("lives and forks:\n")[1].splitlines()[:2]] == [
        [forked[:8], "deleted"],
        ["+", fork["session_id"][:8], "forks", "turn"],
    ]
    assert f"from {forked}: fork at turn 1; 1 turns, 1 asked again" in words.stdout
    assert "messages[2]: Stop. Now=here." in words.stdout
    assert "turn 1: resampled" in words.stdout
    assert "forked at turn  -" in compared.stdout
    assert "part in turn 1, prompt" in compared.stdout


def test_a_fork_whose_agent_says_something_else_has_no_say(tmp_path: Path) -> None:
    """Its reward is of another state; the turn and the message are named."""
    scenario = write_scenario(tmp_path / "small", program=DRIFTS, samples_per_prompt=1, prompts=[{}])
    assert harness("run", scenario, "--out", tmp_path / "run").code == 0
    first, second = (harness("fork", tmp_path / "run", "0", "--at", turn, "-n", "2", "--json") for turn in ("0", "1"))

    assert first.document["value"]["forks"] == 2
    assert second.document["value"] is None
    assert all("turn 1: messages[2].content is 'Go on." in fork["difference"] for fork in second.document["forks"])


def test_other_weights_are_asked_for(run: Path, tmp_path: Path) -> None:
    """Of the turn to resample, by version, and of the whole model, by digest."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    with closing(sqlite3.connect(copy / "run.db")) as database, database:
        database.execute("""UPDATE turns SET version_spans = replace(version_spans, '"0"', '"7"') WHERE turn = 1""")
    other = harness("fork", copy, "2", "--at", "1", "-n", "1")
    before = harness("fork", copy, "2", "--at", "0", "-n", "1")
    lock = json.loads((copy / "lock.json").read_text())
    for digests in lock["digests"].values():
        digests["weights_digest"] = "of before"
    (copy / "lock.json").write_text(json.dumps(lock))
    changed = harness("fork", copy, "2", "--at", "0", "-n", "1")
    current = harness("fork", copy, "2", "--at", "1", "-n", "1", "--weights", "current")
    for digests in lock["digests"].values():
        digests["template_digest"] = "of before"
    (copy / "lock.json").write_text(json.dumps(lock))
    template = harness("fork", copy, "2", "--at", "1", "-n", "1", "--weights", "current")

    assert (other.code, before.code, changed.code, current.code, template.code) == (4, 0, 4, 0, 4)
    assert "turn 1 was sampled by the weights 7, the engine serves 0; --weights current" in other.stderr
    assert "weights_digest" in changed.stderr
    assert "template_digest" in template.stderr


def test_an_engine_that_is_gone_is_named(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    config = tmp_path / "run" / "config.toml"
    shutil.copytree(run.parent / "toy", tmp_path / "toy")
    for name in ("config.json", "model.safetensors"):  # no engine reads them
        (tmp_path / "toy" / name).write_text("{}")
    text = config.read_text().replace(str(run.parent / "toy"), str(tmp_path / "toy"))
    config.write_text(text.replace('name = "scripted"', 'name = "sglang=http://127.0.0.1:9"'))
    gone = harness("fork", tmp_path / "run", "2", "--at", "1", "-n", "1")

    assert gone.code == ExitCode.INFRASTRUCTURE
    assert "http://127.0.0.1:9" in gone.stderr


def test_a_session_that_lives_is_not_forked(run: Path, tmp_path: Path) -> None:
    """One that a killed run left open is."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    with closing(sqlite3.connect(copy / "run.db")) as database, database:
        database.execute("UPDATE sessions SET phase = 'open', closed_at = NULL, closed_because = NULL")
    with RunDirectory(copy).occupy():
        lives = harness("fork", copy, "2", "--at", "1", "-n", "1")
    left = harness("fork", copy, "2", "--at", "1", "-n", "1")

    assert (lives.code, left.code) == (4, 0)
    assert "another process uses the run" in lives.stderr


def test_each_trained_turn_has_a_value(run: Path, tmp_path: Path) -> None:
    """Printed, and a column of the session's samples."""
    ended = harness("values", run, "2", "-n", "2", "--out", tmp_path)

    assert ended.code == 0, ended.stderr
    turns = int(ended.stdout.splitlines()[-1].removeprefix("turn ").split(":")[0]) + 1
    assert ended.stdout.splitlines() == [f"turn {number}: {turns} ({turns} to {turns})" for number in range(turns)]
    [sample] = [each for each in read_samples(tmp_path / "samples.jsonl") if each.index == 2]
    assert sample.metadata["turn_values"]["1"] == {"mean": turns, "low": turns, "high": turns, "forks": 2}
    assert set(sample.turn_values[sample.loss_mask == 1].tolist()) == {turns}


def test_a_crashed_rollout_goes_on_in_its_run(tmp_path: Path) -> None:
    """It is final, so the run itself would not play it again; one sample has both lives, and no token is lost."""
    allowed = tmp_path / "allowed"
    program = AGENT.replace("    turns += 1\n", f"    turns += 1\n    pathlib.Path({str(allowed)!r}).stat()\n")
    scenario = write_scenario(tmp_path / "small", program=program, samples_per_prompt=1, prompts=[{}])
    assert harness("run", scenario, "--out", tmp_path / "run").code == 0
    [crashed] = read_rollouts(tmp_path / "run" / "run.db").values()
    allowed.touch()
    resumed = harness("resume", tmp_path / "run", "0", "--json")
    again = harness("resume", tmp_path / "run", crashed.session_id)
    shown = harness("show", tmp_path / "run", "0", "--json").document

    assert (crashed.outcome, resumed.code) == (OutcomeKind.CRASHED, 0), resumed.stderr
    assert (again.code, "last session of a rollout" in again.stderr) == (4, True)
    [(_, record)] = read_rollouts(tmp_path / "run" / "run.db").items()
    [sample] = record.export_samples()
    assert sample.metadata["turns"] == [0, 1]
    ledger = resumed.document["ledger"]
    assert ledger["generated"] == ledger["trained"] == int(sample.loss_mask.sum())
    assert shown["session"]["inherits"]["asked_again"] == 1
    assert shown["session"]["inherits"]["session_id"] == shown["line"]["inherits"] == crashed.session_id
    listed = harness("show", tmp_path / "run").stdout
    compared = harness("diff", tmp_path / "run", crashed.session_id, tmp_path / "run", "0").stdout
    assert f"+ {shown['line']['session_id'][:8]}  continues  finished" in listed
    assert "part in turn 1, which one of them does not have" in compared


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("2", "--at", "9"), 4, "no turn 9"),
        (("9", "--at", "0"), 4, "9"),
        (("2", "--at", "1", "--out", "."), 4, "not empty"),
        (("2", "--at", "1", "-n", "1001"), 4, "less than or equal to 1000"),
        (("2", "--at", "1", "--edit", "1=x"), 4, "2 (user); got message 1"),
        (("2", "--at", "1", "--edit", "No."), 4, "MESSAGE=TEXT"),
    ],
)
def test_what_cannot_be_forked_is_named(run: Path, arguments: tuple[str, ...], code: int, said: str) -> None:
    ended = harness("fork", run, *arguments, cwd=run)

    assert ended.code == code, ended
    assert said in ended.stderr
    assert len(ended.stderr.strip().splitlines()) <= 2

"""Audits of runs: while they continue, by command afterwards, and what the viewer shows of them."""

import asyncio
import json
import shutil
import sqlite3
import tomllib
from contextlib import closing
from pathlib import Path
from typing import NoReturn

import pytest
import tomli_w
import transformers

from harness.engines.base import TokenProvider
from harness.engines.scripted import ScriptedEngine
from harness.errors import RunError
from harness.server.store.sqlite import SQLiteStore
from harness.suite.record.rollout_table import read_rollouts
from harness.suite.record.rundir import RunDirectory
from harness.suite.run.audited import RunAudit, audit_sessions, find_weights, open_template
from harness.training.audit.causes import GapCause
from harness.viewer.look import look_at
from harness.viewer.report import make_report
from tests.builders import toy_tokenizer
from tests.harness_command import harness
from tests.otlp_collector import read_request, said
from tests.toy_model import write_toy_weights
from tests.trained_scenario import write_real_scenario

pytestmark = pytest.mark.xdist_group("audited")  # played once, on one worker

OLD = Path(__file__).parents[1] / "unit" / "store" / "store_of_version_6.sql"


@pytest.fixture(scope="module", name="run")
def _run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the local engine with an update of the weights, all of whose rollouts are audited as they end."""
    place = tmp_path_factory.mktemp("audited")
    scenario = place / "audited" / "scenario.toml"
    write_real_scenario(scenario.parent)
    told = tomllib.loads(scenario.read_text())
    del told["train"]
    told |= {"audit": {"share": 1.0}, "samples_per_prompt": 3, "concurrency": 1}
    told |= {
        "prompts": [{"metadata": {"turns": 1, "pause_s": 2}}],
        "weights": {"updates": [{"when": "session_ended"}], "noise": 2.0},
    }
    scenario.write_text(tomli_w.dumps(told))
    (scenario.parent / "check.py").unlink()
    ended = harness("run", scenario.parent, "--out", place / "run")
    assert ended.code == 0, ended.stdout
    return place / "run"


def test_a_run_names_the_causes_of_its_gap(run: Path) -> None:
    """Tokens of before the update have older weights than the trainer's."""
    result = json.loads((run / "result.json").read_text())

    assert result["audit"]["named"] == [GapCause.VERSION]
    assert result["telemetry"]["audit/gap"] == result["audit"]["gap"] > 0.05
    assert result["telemetry"]["audit/version"] == pytest.approx(result["audit"]["gap"], rel=0.1)
    by_version = {row["value"]: row["gap"] for row in result["audit"]["groups"]["version"]}
    assert by_version[0] > 0.05
    assert by_version[1] < 1e-4


def test_training_is_audited_as_it_goes_on(tmp_path: Path) -> None:
    """Rollouts are compared while their weights are there; a step's figures have the gap of those so far."""
    scenario = tmp_path / "audited" / "scenario.toml"
    write_real_scenario(scenario.parent)
    told = tomllib.loads(scenario.read_text()) | {"audit": {"share": 1.0}}
    told["train"]["optimizer"] = {"learning_rate": 0.05}  # so that old weights are far from new ones
    scenario.write_text(tomli_w.dumps(told))
    ended = harness("train", scenario.parent, "--steps", "3", "--out", tmp_path / "run", "--json")

    assert ended.code == 0, ended.stderr
    audit = json.loads((tmp_path / "run" / "audit.json").read_text())
    assert ended.document["audit"] == audit
    assert audit["tokens"] > 0
    assert "batch" not in audit["not_probed"]  # the engine scored again
    versions = {row["value"] for row in audit["groups"]["version"]}
    assert versions >= {0, 1}
    steps = [json.loads(line) for line in (tmp_path / "run" / "telemetry.jsonl").read_text().splitlines()]
    assert any("audit/gap" in step for step in steps)
    assert set(audit["named"]) <= {GapCause.VERSION}, audit["verdicts"]
    assert any("audit: " in sentence for sentence in [harness("show", tmp_path / "run").stdout])


def write_smaller(folder: Path) -> Path:
    """A model with fewer tokens."""
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.LlamaConfig(**shape, vocab_size=64)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


async def audit_again(
    run: Path, engine: TokenProvider, *more: tuple[str, int, str | None], is_stopped: bool = False
) -> tuple[RunAudit, list[str]]:
    """An audit of each rollout of `run`, and of `more` by scenario, seed and session; what is said meanwhile."""
    said: list[str] = []
    rollouts = [("audited", each.seed, each.session_id) for each in read_rollouts(run / "run.db").values()]
    async with asyncio.TaskGroup() as tasks:
        audit = RunAudit(RunDirectory(run), {"audited": 1.0}, said.append, lambda: is_stopped, tasks)
        for rollout in (*more, *rollouts):
            audit.add(*rollout, engine)
    return audit, said


async def test_an_audit_of_a_stopped_run_ends(run: Path) -> None:
    """Before its next pass, and without a report."""
    before = (run / "audit.json").read_bytes()
    audit, said = await audit_again(run, ScriptedEngine(toy_tokenizer()), is_stopped=True)
    await audit.finish()

    assert said == ["audit: stopped before its end"]
    assert (run / "audit.json").read_bytes() == before


class BrokenEngine(ScriptedEngine):
    async def score(self, *asked: object, **how: object) -> NoReturn:
        raise OSError("no answer")


async def test_an_engine_that_cannot_score_costs_its_probe_alone(run: Path, tmp_path: Path) -> None:
    audit, said = await audit_again(shutil.copytree(run, tmp_path / "run"), BrokenEngine(toy_tokenizer()))

    assert said.count("audit: no answer") == 1
    assert audit.json is not None
    assert audit.json["branches"] == len(read_rollouts(run / "run.db"))
    assert GapCause.BATCH in audit.json["not_probed"]


async def test_a_rollout_with_a_gap_is_said_as_it_ends(run: Path, tmp_path: Path) -> None:
    """That of the old weights; one whose session is gone, too. The report grows with each."""
    seed, session_id = next((each.seed, each.session_id) for each in read_rollouts(run / "run.db").values())
    more = [("audited", seed, "0" * 32), ("another", seed, session_id)]
    copy = shutil.copytree(run, tmp_path / "run")
    audit, said = await audit_again(copy, ScriptedEngine(toy_tokenizer()), *more)

    assert len(said) > 1
    assert said[0].startswith("audit: ")
    assert all(words.startswith("audit of session ") and ": version: " in words for words in said[1:])
    assert audit.json is not None
    assert audit.json["branches"] == len(read_rollouts(run / "run.db"))


def test_the_command_finds_the_same(run: Path) -> None:
    """And leaves the report of the run's own audit, for which the engine scored again."""
    kept = (run / "audit.json").read_bytes()
    before = json.loads(kept)
    ended = harness("audit", run, "--json")

    assert ended.code == 0, ended.stderr
    assert (ended.document["named"], ended.document["tokens"]) == (before["named"], before["tokens"])
    assert ended.document["gap"] == pytest.approx(before["gap"], rel=1e-3)
    assert GapCause.BATCH in ended.document["not_probed"]
    assert (run / "audit.json").read_bytes() == kept
    assert "stays as the run wrote it" in ended.stderr


def test_the_command_replaces_its_own_report(run: Path, tmp_path: Path) -> None:
    """As of a run that was killed before it wrote one."""
    killed = shutil.copytree(run, tmp_path / "run")
    (killed / "audit.json").unlink()
    one = harness("audit", killed, str(next(iter(read_rollouts(run / "run.db").values())).session_id), "--json")
    ended = harness("audit", killed, "--json")

    assert one.document["branches"] < ended.document["branches"]
    assert json.loads((killed / "audit.json").read_text()) == ended.document
    assert "stays" not in ended.stderr


def test_the_command_reads_a_store_with_named_weights(run: Path) -> None:
    told = harness("audit", run / "run.db", "--weights", f"1={run / 'checkpoints' / '1'}")

    assert told.code == 0, told.stderr
    assert "left out" in told.stdout
    assert "no cause" in told.stdout


def test_the_viewer_shows_verdict_and_curves(run: Path) -> None:
    view = look_at(run)
    shown = harness("show", run).stdout

    assert "audit: version: " in shown
    [[cause, nats, *_]] = [table.rows[0] for table in make_report(run).tables if table.title == "Audit"]
    assert cause == "version"
    assert float(nats) == pytest.approx(view.audit["gap"], rel=0.1)
    assert {"position", "turn", "version", "worker"} == view.audit["groups"].keys()


def test_spans_have_the_gap_of_their_session(run: Path, tmp_path: Path) -> None:
    assert harness("report", run, "--format", "otel", "--out", tmp_path).code == 0
    traces = [read_request(line) for line in (tmp_path / "traces.jsonl").read_text().splitlines()]
    gaps = {said(spans[0])["session.id"]: said(spans[0])["harness.audit.gap"] for spans in traces}
    assert gaps == json.loads((run / "audit.json").read_text())["sessions"]
    assert min(gaps.values()) < 0.05 < max(gaps.values())


def test_a_damaged_report_is_missing(run: Path, tmp_path: Path) -> None:
    """Until the command replaces it."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    for damaged in ("{", '{"verdicts": ["x"]}'):
        (copy / "audit.json").write_text(damaged)
        assert any("its audit" in sentence for sentence in look_at(copy).missing)
    assert harness("audit", copy).code == 0
    assert look_at(copy).audit["named"] == [GapCause.VERSION]


def test_weights_that_are_gone_are_said(run: Path, tmp_path: Path) -> None:
    store = RunDirectory(run).database

    assert find_weights(RunDirectory(run)).keys() == {0, 1}
    with pytest.raises(RunError, match="found none"):
        audit_sessions(store, [], {}, None)
    with pytest.raises(RunError, match=r"versions \[7\]"):
        audit_sessions(store, [], {7: run / "checkpoints" / "1"}, None)
    with pytest.raises(RunError, match="the model that sampled"):
        audit_sessions(store, [], {0: run / "checkpoints" / "1", 1: write_smaller(tmp_path / "other")}, None)
    assert "expected VERSION=FOLDER" in harness("audit", store, "--weights", "new=there").stderr
    assert "no session" in harness("audit", run, "nobody").stderr


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("folder", "found no file"),
        ("nowhere.db", "found no file"),
        ("empty.db", "got none: no rollout has one yet"),
        ("later.db", "written by a newer harness"),
    ],
)
async def test_what_has_no_tokens_is_refused_by_name(where: str, words: str, run: Path, tmp_path: Path) -> None:
    """A folder without a run, a store that is not there, one without a session, one of a later version."""
    (tmp_path / "folder").mkdir()
    shutil.copy(run / "run.db", tmp_path / "later.db")
    with closing(sqlite3.connect(tmp_path / "later.db")) as connection:
        connection.execute("PRAGMA user_version = 99")
    async with SQLiteStore(tmp_path / "empty.db"):
        pass
    ended = harness("audit", tmp_path / where, "--weights", f"0={run / 'checkpoints' / '1'}")

    assert ended.code != 0
    assert words in ended.stderr


def test_a_run_that_was_killed_is_audited_as_far_as_it_went(run: Path, tmp_path: Path) -> None:
    """Without its report, and with a folder of weights that was begun; damaged weights are named."""
    killed = shutil.copytree(run, tmp_path / "killed")
    (killed / "result.json").unlink()
    (killed / "audit.json").unlink()
    (killed / "checkpoints" / "2").mkdir()
    found = harness("audit", killed, "--json")
    (killed / "checkpoints" / "2" / "model.safetensors").write_bytes(b"half")
    refused = harness("audit", killed)

    assert found.document["named"] == [GapCause.VERSION]
    assert "comparing branch 1 of" in found.stderr
    assert refused.code != 0
    assert f"cannot load the model in {killed / 'checkpoints' / '2'}" in refused.stderr


def test_a_store_of_an_older_version_is_audited(tmp_path: Path) -> None:
    """Its turns have neither workers nor rows; another engine said its words."""
    with closing(sqlite3.connect(tmp_path / "old.db")) as connection:
        connection.executescript(OLD.read_text(encoding="utf-8"))
    weights = {0: write_toy_weights(tmp_path / "weights", seed=0)}
    report = audit_sessions(tmp_path / "old.db", (), weights, open_template(weights))

    assert report.tokens > 0
    assert [share.cause for share in report.attribution.named][:1] == [GapCause.ENGINE], report.verdicts

"""The scenarios `abort_*` that come along: each runs as a user would run it, and nothing invalid comes out of it."""

import json
import re
from pathlib import Path

import pytest

from harness.samples.codec import sample_from_json
from harness.suite.scenarios.folder import bundled_scenarios
from tests.harness_command import harness
from tests.installed_harness import RunShipped
from tests.played_suites import incomplete_inside
from tests.toy_model import write_toy_model

SHIPPED = [each.name for each in bundled_scenarios() if each.scenario.faults and each.scenario.services is None]
"""Those on services start an engine server: `tests/real/lanes` has one of them."""


@pytest.mark.parametrize("scenario", SHIPPED)
def test_a_shipped_scenario_passes(tmp_path: Path, scenario: str, model_dir: Path, run_shipped: RunShipped):
    """Its checks hold, every fault came, the ledger balances, and no sample continues from an incomplete turn."""
    del model_dir  # fetched before: the run does not wait for it
    out = tmp_path / "run"
    ended = run_shipped(scenario, out)

    assert ended.code == 0, ended.stderr + ended.stdout
    report = ended.document
    (ran,) = report["scenarios"]
    assert report["ledger"]["difference"] == 0
    heard = report["witness"]
    killed = any(fault["action"] == "kill_server" for fault in report["scenarios"][0]["faults"])
    assert heard["agrees"] or (killed and "session server was killed" in heard["not_comparable"][0]["reason"])
    assert [fault["action"] for fault in ran["faults"] if not fault["fired"]] == []
    lines = [json.loads(line) for line in (out / "faults.jsonl").read_text().splitlines()]
    reported = [firing for fault in ran["faults"] for firing in fault["firings"]]
    assert sorted(map(str, lines)) == sorted(map(str, reported))
    samples = [sample_from_json(json.loads(line)) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert samples
    assert incomplete_inside(out / "run.db", samples) == []


def test_the_report_says_what_became_of_every_session(tmp_path: Path):
    """On a terminal: each fault, the sessions that were there, what they were told, and the ledger."""
    ended = harness(
        "run", "abort_end_of_rollout", "--model", write_toy_model(tmp_path / "toy"), "--out", tmp_path / "r"
    )

    assert ended.code == 0, ended.stderr + ended.stdout
    assert "end_rollout at turn 3, token 8: came once" in ended.stdout
    assert re.search(r"session 0 in turn 3: drained, .*completed; told 404 (turn_aborted|session_closed)", ended.stdout)
    assert len(re.findall(r"dropped[^;]*; difference 0", " ".join(ended.stdout.split()))) == 2

"""The scenarios that ship pass on the real model; `quickstart` has a test of its own in `tests/e2e`."""

from pathlib import Path

import pytest

from harness.types import Json
from tests.suite.builders import harness

pytestmark = [pytest.mark.model, pytest.mark.agent, pytest.mark.timeout(300)]


def _run(name: str, out: Path, model_dir: Path) -> Json:
    ended = harness("run", name, "--model", model_dir, "--out", out, "--json", timeout_s=280)
    assert ended.code == 0, ended.stdout + ended.stderr
    scenario: Json = ended.document["scenarios"][0]
    return scenario


def test_a_long_session_really_is_long(tmp_path: Path, model_dir: Path):
    """More than forty turns in every session, most sums right."""
    scenario = _run("long_session", tmp_path / "run", model_dir)

    assert all(rollout["turns"] >= 40 for rollout in scenario["rollouts"])
    assert scenario["ledger"]["dropped"] == {}


def test_what_follows_a_cut_is_served_and_dropped(tmp_path: Path, model_dir: Path):
    """The dialogue goes on, the samples end at the cut, the ledger knows."""
    scenario = _run("length_limited", tmp_path / "run", model_dir)

    assert scenario["truncated_turns"] > 0
    assert scenario["dropped_trailing_turns"] > 0
    assert scenario["ledger"]["dropped"]["after_incomplete"] > 0

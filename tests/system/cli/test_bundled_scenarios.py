"""The scenarios that ship pass as a user runs them: by name, from a wheel, on the model that they name themselves.

Where a run is looked at more closely, it is run there and not a second time here.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.suite.scenarios.folder import bundled_scenarios
from harness.types import Json
from tests.installed_harness import RunShipped

pytestmark = [pytest.mark.model, pytest.mark.agent, pytest.mark.timeout(1860)]


RUN_HERE = {"long_session", "length_limited", "train_tool_game"}
RUN_ELSEWHERE = {
    "quickstart": "tests/system/test_quickstart_run.py",
    "starter": "tests/system/cli/test_init.py",
    "weight_updates": "tests/system/weights/test_scenario.py",
}
"""Those with faults run in `tests/system/faults/test_faults_shipped.py`."""


@pytest.fixture(name="passed")
def _passed(run_shipped: RunShipped, tmp_path: Path, model_dir: Path) -> Callable[..., Json]:
    """Runs a scenario and returns its part of the report."""
    del model_dir  # fetched before: the run does not wait for it

    def run(name: str, *options: str | Path) -> Json:
        ended = run_shipped(name, tmp_path / "run", *options)
        assert ended.code == 0, ended.stdout + ended.stderr
        scenario: Json = ended.document["scenarios"][0]
        return scenario

    return run


def test_every_scenario_that_ships_is_run():
    """A new one without faults needs a line here, and a test."""
    without_faults = {folder.name for folder in bundled_scenarios() if not folder.scenario.faults}

    assert without_faults == RUN_HERE | set(RUN_ELSEWHERE)


def test_a_long_session_is_one_branch(passed: Callable[..., Json]):
    """Ten sums in every session, most of them right; `make soak` has all forty-five."""
    shorter = ("prompts=[{metadata={game={sums=10,seed=1}}}]", "checks.min_turns=10")
    scenario = passed("long_session", *(option for each in shorter for option in ("--set", each)))

    assert all(rollout["turns"] >= 10 for rollout in scenario["rollouts"])
    assert scenario["ledger"]["dropped"] == {}


def test_what_follows_a_cut_is_served_and_dropped(passed: Callable[..., Json], model_dir: Path):
    """The dialogue continues, the samples end at the cut, the ledger knows; any model says enough to be cut."""
    scenario = passed("length_limited", "--model", model_dir)

    assert scenario["truncated_turns"] > 0
    assert scenario["dropped_trailing_turns"] > 0
    assert scenario["ledger"]["dropped"]["after_incomplete"] > 0


def test_a_game_is_played_by_the_model_that_it_makes(passed: Callable[..., Json]):
    """Which knows how to call the tool, and follows the marks now and then."""
    scenario = passed("train_tool_game")
    rewards = {rollout["reward"] for rollout in scenario["rollouts"]}

    assert scenario["tool_calls"] >= 16
    assert rewards <= {0.0, 0.25, 0.5, 0.75, 1.0}
    assert len(rewards) > 1

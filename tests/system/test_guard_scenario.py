"""A scenario that demands the guard: its limits reach the engine, and the run's report says what the guard did."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.errors import ScenarioError
from harness.suite.scenarios.folder import load_scenario
from harness.suite.scenarios.scenario import RepeatGuardSpec
from server_patch.repeat_terminate import RepeatTerminateConfig
from tests.harness_command import Ended, harness, write_scenario

LIMITS = {"min_new_tokens": 4, "max_consecutive_token_repeats": 4}
LOOP = {"steps": [{"text": "Fine."}, {"text": "No" + "o" * 20}]}
CONFIG = RepeatTerminateConfig.from_mapping({"enabled": True, **LIMITS})


def write_guarded(directory: Path, guard: dict[str, Any] | None = LIMITS) -> Path:
    """Four sessions of two turns each, the second of which loops."""
    toy = str(directory.parent / "toy")
    engine = {"name": "scripted", "model": toy, "script": "script.toml"}
    return write_scenario(
        directory,
        script=LOOP,
        engine=engine if guard is None else {**engine, "repeat_guard": guard},
        prompts=[{"metadata": {"turns": 2}}, {"metadata": {"turns": 2}}],
    )


def run(scenario: Path, out: Path, **env: str) -> Ended:
    return harness("run", scenario, "--out", out, "--json", env=env)


def guard_telemetry(document: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document["telemetry"].items() if "repeat" in name}


def test_the_keys_are_those_of_the_guard() -> None:
    assert RepeatGuardSpec().config.to_mapping() == {**RepeatTerminateConfig().to_mapping(), "enabled": True}


@pytest.mark.parametrize(
    ("guard", "problem"),
    [
        ({"ngram_sise": 4}, "engine.repeat_guard.ngram_sise: expected a known key, .* did you mean 'ngram_size'?"),
        ({"ngram_size": "4"}, "engine.repeat_guard.ngram_size: expected a valid integer, got '4'"),
        ({"ngram_size": -4}, "engine.repeat_guard: expected ngram_size: expected an integer of at least 0, got -4"),
    ],
)
def test_wrong_limits_are_named(tmp_path: Path, guard: dict[str, Any], problem: str) -> None:
    with pytest.raises(ScenarioError, match=problem):
        load_scenario(write_guarded(tmp_path / "s", guard))


@pytest.mark.agent
def test_a_run_reports_what_the_guard_did(tmp_path: Path) -> None:
    ended = run(write_guarded(tmp_path / "s"), tmp_path / "run")
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    (identity,) = json.loads((tmp_path / "run" / "lock.json").read_text())["digests"].values()

    assert ended.code == 0, ended.stderr
    assert guard_telemetry(ended.document) == {
        "rollout/repeat_terminate_active": 1,
        "rollout/repeat_terminate_triggered_sequences": 4,
    }
    assert ended.document["scenarios"][0]["repeat_terminated_turns"] == 4
    assert [sample["repeat_terminated"] for sample in samples] == [1, 1, 1, 1]
    assert identity["repeat_guard"] == CONFIG.digest()


@pytest.mark.agent
def test_the_environment_demands_the_guard_for_every_scenario(tmp_path: Path) -> None:
    ended = run(write_guarded(tmp_path / "s", None), tmp_path / "run", **CONFIG.to_environ())

    assert ended.code == 0, ended.stderr
    assert ended.document["telemetry"]["rollout/repeat_terminate_triggered_sequences"] == 4


@pytest.mark.agent
def test_a_scenario_can_do_without_what_the_environment_demands(tmp_path: Path) -> None:
    """The keys are always there, so that a trainer's chart has no holes."""
    scenario = write_guarded(tmp_path / "s", {"enabled": False})

    assert guard_telemetry(run(scenario, tmp_path / "run", **CONFIG.to_environ()).document) == {
        "rollout/repeat_terminate_active": 0,
        "rollout/repeat_terminate_triggered_sequences": 0,
    }

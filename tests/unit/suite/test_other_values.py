"""`--set` and `--limit`: keys of a scenario with other values for one run."""

from pathlib import Path

import pytest

from harness.errors import RunError, ScenarioError
from harness.suite.record.config import Overrides
from harness.suite.run.open_run import begin_run, resume_run
from harness.suite.scenarios.folder import bundled_scenarios
from harness.suite.scenarios.scenario import Scenario
from tests.harness_command import write_scenario

_SERVER = "http://127.0.0.1:1"


def _begin(
    tmp_path: Path, *settings: str, limit: int | None = None, seed: int | None = None, server: str | None = None
) -> Scenario:
    overrides = Overrides(settings=list(settings) or None, limit=limit, seed=seed, server=server)
    return begin_run(str(write_scenario(tmp_path / "s")), overrides, tmp_path / "run").selection.folders[0].scenario


def test_keys_take_the_values_that_toml_says(tmp_path: Path):
    """Tables are merged, lists replaced; an option of its own wins."""
    settings = (
        "limits.turns = 3",
        'agent.env={MOOD="calm"}',
        'agent.env."TWO.PARTS"="x"',
        "seed=8",
        "samples_per_prompt=1",
    )
    scenario = _begin(tmp_path, *settings, limit=1, seed=9)

    assert (scenario.limits.turns, scenario.seed, scenario.data.limit) == (3, 9, 1)
    assert (scenario.agent.env, scenario.agent.deadline_s) == ({"MOOD": "calm", "TWO.PARTS": "x"}, 60.0)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("limits.turn=3", "limits.turn: expected a known key, got 'turn'; did you mean 'turns'?"),
        ("limits.turns='3'", "limits.turns: expected a valid integer, got '3'"),
        ("engine.name=scripted", "put text in quotes"),
        ("engine.script='gone.toml'", "engine.script: expected a file of the scenario, got 'gone.toml'"),
        ("limits", "expected KEY=VALUE"),
        ("", "expected KEY=VALUE"),
        ("name='other'", "no key of name, prompts_file, schema_version"),
        ("prompts=[]", "prompts: "),
    ],
)
def test_what_would_be_wrong_in_the_file_is_refused(tmp_path: Path, setting: str, said: str):
    with pytest.raises(ScenarioError) as refused:
        _begin(tmp_path, setting)
    assert said in refused.value.message
    assert not (tmp_path / "run").exists()


def test_a_fault_on_a_session_that_is_left_out_is_named(tmp_path: Path):
    fault = {"action": "engine_500", "at_turn": 1, "sessions": [3]}
    suite = str(write_scenario(tmp_path / "s", faults=[fault]))
    with pytest.raises(ScenarioError, match="sessions from 0 to 1 and not 3"):
        begin_run(suite, Overrides(limit=1), tmp_path / "run")


def test_a_run_goes_on_with_its_values_and_refuses_others(tmp_path: Path):
    suite, out = str(write_scenario(tmp_path / "s")), tmp_path / "run"
    begun = begin_run(suite, Overrides(settings=["limits.turns=3"], limit=1), out)

    assert resume_run(suite, Overrides(), out).selection.config == begun.selection.config
    with pytest.raises(RunError, match=r"limits\.turns: 3 -> 4"):
        resume_run(suite, Overrides(settings=["limits.turns=4"]), out)


@pytest.mark.parametrize("folder", bundled_scenarios(), ids=lambda folder: folder.name)
def test_what_is_not_set_stays_as_it_was(folder):
    scenario = Overrides(settings=['description = "Another one."']).apply(folder.scenario)
    assert scenario.model_dump() == folder.scenario.model_dump() | {"description": "Another one."}


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ('faults=[{action="pause", at_turn=1, seconds=1.0}]', "s: faults changes or breaks the whole server"),
        ('weights={updates=[{when="in_turn"}]}', "s: weights changes or breaks the whole server"),
        ('engine.name="sglang"', "--set engine.name, got both"),
        ('engine={model="tiny"}', "--set engine.model, got both"),
        ('engine.script="script.toml"', "--set engine.script, got both"),
        ('services={workers=["sglang=http://127.0.0.1:1"], router=true}', "--set services, got both"),
    ],
)
def test_a_setting_that_is_not_for_others_is_refused_on_their_server(tmp_path: Path, setting: str, said: str):
    """As the file of a scenario is, before there is a run directory."""
    (tmp_path / "s").mkdir()
    (tmp_path / "s/script.toml").touch()
    with pytest.raises(ScenarioError) as refused:
        _begin(tmp_path, setting, server=_SERVER)
    assert said in refused.value.message
    assert not (tmp_path / "run").exists()


def test_a_setting_may_take_away_what_their_server_cannot_have(tmp_path: Path):
    """The scenario counts as it is run; the guard is asked of the server."""
    suite = write_scenario(tmp_path / "s", faults=[{"action": "engine_500", "at_turn": 1}])
    overrides = Overrides(server=_SERVER, settings=["faults=[]", "engine.repeat_guard.max_consecutive_token_repeats=9"])
    scenario = begin_run(str(suite), overrides, tmp_path / "run").selection.folders[0].scenario

    assert not scenario.faults
    assert scenario.engine.repeat_guard is not None

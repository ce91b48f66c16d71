"""The plan and the configuration of a run depend on what was asked for, and on nothing else."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from harness.errors import RunError, ScenarioError
from harness.suite.record.config import Overrides, RunConfig, select
from harness.suite.run.services import EngineChoice
from harness.suite.scenarios.folder import ScenarioFolder, find_scenarios
from harness.suite.scenarios.plan import PlannedRollout, plan_rollouts
from tests.harness_command import write_scenario


def _rollouts(folders: Sequence[ScenarioFolder]) -> list[PlannedRollout]:
    return list(chain.from_iterable(plan_rollouts(folders)))


def test_every_prompt_is_a_group_of_samples(tmp_path: Path):
    """Numbers and groups continue over all scenarios of a suite."""
    for name in ("a", "b"):
        write_scenario(tmp_path / "suite" / name)
    plan = _rollouts(find_scenarios(str(tmp_path / "suite")))

    assert [rollout.number for rollout in plan] == list(range(8))
    assert [rollout.group for rollout in plan] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_seeds_belong_to_the_place_in_the_scenario(tmp_path: Path):
    """Another seed changes all of them, another scenario beside it none (I10)."""
    write_scenario(tmp_path / "suite" / "b")
    alone = [rollout.seed for rollout in _rollouts(find_scenarios(str(tmp_path / "suite")))]
    write_scenario(tmp_path / "suite" / "a")
    beside = [rollout.seed for rollout in _rollouts(find_scenarios(str(tmp_path / "suite")))[4:]]
    other = [rollout.seed for rollout in _rollouts(select(str(tmp_path / "suite" / "b"), Overrides(seed=9)).folders)]

    assert alone == beside
    assert len(set(alone) | set(other)) == 8


def test_a_session_is_asked_for_as_the_scenario_says(tmp_path: Path):
    """Only what was given is sent; the rest is the server's to decide."""
    directory = write_scenario(
        tmp_path / "s", limits={"turns": 3}, sampling={"temperature": 0.5}, after_incomplete="serve"
    )
    first = _rollouts(find_scenarios(str(directory)))[0]

    assert first.session == {
        "metadata": {"scenario": "s", "rollout": 0},
        "limits": {"turns": 3},
        "sampling": {"temperature": 0.5, "seed": first.seed},
        "after_incomplete": "serve",
    }


SCRIPT = """
[[steps]]
text = "one"
delay_s = 0.1

[[steps]]
tokens = [5, 6]
finish = "length"
"""


@pytest.mark.parametrize("name", ["local", "vllm", "scripted"])
def test_an_engine_without_a_script_of_its_own_gets_that_of_each_session(tmp_path: Path, name: str):
    """Its words; a real engine takes its own time. The scripted one plays the file."""
    directory = write_scenario(tmp_path / "s", engine={"name": name, "script": "words.toml", "force_script": True})
    (directory / "words.toml").write_text(SCRIPT)
    first = _rollouts(find_scenarios(str(directory)))[0]

    steps = [{"text": "one", "finish": "stop"}, {"tokens": (5, 6), "finish": "length"}]
    assert first.session.get("script") == (None if name == "scripted" else {"steps": steps})


def test_a_script_that_fails_is_no_script_of_a_session(tmp_path: Path):
    """The scripted engine can break off in a step; real ones do it by the faults of the scenario."""
    directory = write_scenario(tmp_path / "s", engine={"script": "words.toml", "force_script": True})
    (directory / "words.toml").write_text('[[steps]]\ntext = "one"\nfault = "hang"\n')

    with pytest.raises(ScenarioError, match=r"words.toml: steps\[0\]: expected no 'hang'"):
        find_scenarios(str(directory))


def test_a_configuration_comes_back_from_its_file(tmp_path: Path):
    selection = select(str(write_scenario(tmp_path / "s")), Overrides(seed=5))
    path = tmp_path / "config.toml"
    path.write_text(selection.config.to_toml())
    loaded = RunConfig.load(path)

    assert loaded == selection.config
    loaded.check_unchanged(loaded.reload(Overrides()).config)


@pytest.mark.parametrize(
    ("services", "workers", "lanes", "joined"),
    [
        (None, ["vllm=http://a:1", "sglang=http://b:1"], [], ["vllm=http://a:1", "sglang=http://b:1"]),
        ({"lanes": [{"engine": "sglang"}, {"engine": "vllm"}]}, ["vllm=http://a:1"], ["sglang"], ["vllm=http://a:1"]),
        (
            {"lanes": [{"engine": "sglang"}], "workers": ["vllm=http://a:1"]},
            ["sglang=http://b:1"],
            [],
            ["vllm=http://a:1", "sglang=http://b:1"],
        ),
    ],
)
def test_workers_take_the_place_of_engines_of_their_kind(
    tmp_path: Path, services: dict[str, Any] | None, workers: list[str], lanes: list[str], joined: list[str]
):
    """Behind a router; what is left of the lanes is started, and the same command takes the run up again."""
    own = {} if services is None else {"engine": {}, "services": services | {"router": True}}
    selection = select(str(write_scenario(tmp_path / "s", **own)), Overrides(workers=workers))
    path = tmp_path / "config.toml"
    path.write_text(selection.config.to_toml())
    loaded = RunConfig.load(path)

    found = selection.folders[0].scenario.services
    assert found is not None
    assert ([lane.engine for lane in found.lanes], found.workers, found.router) == (lanes, joined, True)
    loaded.check_unchanged(loaded.reload(Overrides()).config)


@pytest.mark.parametrize(("name", "lanes"), [("sglang", ["sglang"]), ("vllm=http://a:1", []), ("scripted", [])])
def test_an_engine_with_a_server_and_no_address_is_started(tmp_path: Path, name: str, lanes: list[str]):
    """By `--engine`, as if it were the one lane of the scenario's services."""
    selection = select(str(write_scenario(tmp_path / "s")), Overrides(engine=name))
    choice = EngineChoice.of(selection.folders[0])

    assert ([*choice.lanes], choice.has_router) == (lanes, False)


def test_a_changed_configuration_is_refused_with_its_differences(tmp_path: Path):
    """One line each: key, before, now; a changed file counts."""
    directory = write_scenario(tmp_path / "s")
    before = select(str(directory), Overrides()).config
    write_scenario(directory, check="def score(*_): return 0", limits={"turns": 4})

    with pytest.raises(RunError) as caught:
        before.check_unchanged(before.reload(Overrides(seed=8)).config)
    lines = caught.value.message.splitlines()[1:]

    assert [line.split(":")[0].strip() for line in lines] == [
        "overrides.seed",
        "scenarios[0].files.check.py",
        "scenarios[0].scenario.limits.turns",
        "scenarios[0].scenario.seed",
    ]
    assert lines[3].strip() == "scenarios[0].scenario.seed: 3 -> 8"

"""Which model a run serves where the scenario has a program that makes one."""

from pathlib import Path

from harness.suite.record.config import Overrides
from harness.suite.run.services import EngineChoice
from harness.suite.scenarios.folder import ScenarioFolder, load_scenario
from tests.harness_command import write_scenario


def _folder(tmp_path: Path, overrides: Overrides) -> ScenarioFolder:
    directory = write_scenario(tmp_path / "s", train={"rollouts_per_step": 4, "model_program": "make.py"}, seed=3)
    (directory / "make.py").write_text("")
    loaded = load_scenario(directory)
    return ScenarioFolder(loaded.directory, overrides.apply(loaded.scenario), loaded.instruction)


def test_the_program_makes_it_with_the_seed_of_the_run(tmp_path: Path):
    choices = [EngineChoice.of(_folder(tmp_path, overrides)) for overrides in (Overrides(), Overrides(seed=4))]

    assert [(choice.model_program, choice.model_seed) for choice in choices] == [
        (tmp_path / "s" / "make.py", 3),
        (tmp_path / "s" / "make.py", 4),
    ]
    assert choices[0].key != choices[1].key


def test_a_model_that_is_named_takes_its_place(tmp_path: Path):
    """`--model` says which one; nothing is made."""
    choice = EngineChoice.of(_folder(tmp_path, Overrides(model="/models/mine")))

    assert (choice.model, choice.model_program, choice.model_seed) == ("/models/mine", None, 0)

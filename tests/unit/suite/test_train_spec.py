"""`[train]`: strict like the rest of a scenario, and documented key by key."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from harness.errors import ScenarioError
from harness.suite.scenarios.folder import load_scenario
from harness.suite.scenarios.train_spec import TrainSpec
from harness.suite.training.training_pipeline import encoder_of, rules_of
from harness.training.collector.step_rules import StepBudget
from tests.checkout import ROOT
from tests.harness_command import write_scenario
from tests.unit.suite.test_scenario_files import problems_of

_STEP = {"rollouts_per_step": 4}


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"train": {}}, "train: expected either rollouts_per_step or batch"),
        ({"train": {**_STEP, "batch": {"per_device": 4}}}, "train: expected either rollouts_per_step or batch"),
        ({"train": {**_STEP, "encoder": "encoder.py"}}, "train: expected encoder as FILE:NAME, and not 'encoder.py'"),
        (
            {"train": {**_STEP, "encoder": "gone.py:Encoder"}},
            "train.encoder: expected a file of the scenario, got 'gone.py', which does not exist",
        ),
        (
            {"train": {**_STEP, "packing": {"lenght": 9}}},
            "train.packing.lenght: expected a known key, got 'lenght'; did you mean 'length'?",
        ),
        ({"train": {**_STEP, "most_dropped": 1}}, "train: expected most_dropped = 0 without a group_filter"),
        ({"train": {**_STEP, "group_filter": "zero_variance"}}, "train: expected most_dropped of at least 1 with"),
        (
            {"train": {**_STEP, "partial": "resume", "over_sampling": 1, "max_staleness": 1}},
            "train: expected over_sampling of at least 1 and max_staleness of at least 2 with partial = 'resume'",
        ),
        (
            {"train": {**_STEP, "teachers": {"big": 1.0}}},
            "file: expected a table teachers.NAME that is not off for each name in train.teachers",
        ),
        ({"teachers": {"big": {"engine": "sglang"}}}, "teachers.big.engine: teacher teacher: expected the address"),
        (
            {"teachers": {"big": {"engine": "scripted=gone.toml"}}},
            "teachers.big.engine: expected a file of the scenario, got 'gone.toml', which does not exist",
        ),
        ({"train": {**_STEP, "discount": 1.5}}, "train.discount: "),
        ({"train": {**_STEP, "staleness": "keep"}}, "train.staleness: "),
        *(
            (
                {"train": {**_STEP, "advantage": name}, "samples_per_prompt": 1},
                f"file: expected samples_per_prompt of at least 2 with train.advantage = '{name}'",
            )
            for name in ("rollout", "turn", "return_to_go")
        ),
        (
            {"train": _STEP, "samples_per_prompt": 3},
            "file: expected train.rollouts_per_step as a multiple of samples_per_prompt, which is 3, and not 4",
        ),
        (
            {"train": _STEP, "weights": {"updates": [{"when": "in_turn"}]}},
            "file: expected no weights with train, which changes the weights itself",
        ),
        (
            {"train": {**_STEP, "model_program": "gone.py"}},
            "train.model_program: expected a file of the scenario, got 'gone.py', which does not exist",
        ),
    ],
)
def test_a_wrong_key_is_one_line(tmp_path: Path, keys: dict[str, Any], problem: str):
    assert problems_of(write_scenario(tmp_path / "s", **keys))[0].startswith(problem)


def test_a_teacher_is_no_worker_of_its_scenario(tmp_path: Path):
    services = {"workers": ["sglang=http://a:1,http://b:1"], "router": True}
    teachers = {"big": {"engine": "sglang=http://b:1/"}}
    directory = write_scenario(tmp_path / "s", engine={"model": "m"}, services=services, teachers=teachers)
    with pytest.raises(ScenarioError, match="teacher big: expected a server other than the one that samples"):
        load_scenario(directory)


def test_a_budget_is_said_or_derived(tmp_path: Path):
    """Batches count: four rollouts of a device, gathered over three batches; two are generated at once."""
    batch = {"per_device": 4, "gradient_accumulation": 3}
    keys = {"train": {"batch": batch, "decode_micro_batch": 2}, "samples_per_prompt": 2, "concurrency": 8}
    scenario = load_scenario(write_scenario(tmp_path / "s", **keys)).scenario
    assert scenario.train is not None
    rules = rules_of(scenario, scenario.train)

    assert (rules.budget, rules.concurrency) == (StepBudget(12, 2), 2)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("class Encoder:\n    def encode(self, rollout, sample): ...\n", None),
        ("Encoder = dict\n", "expected encoder.py:Encoder to make a SegmentEncoder, got {}"),
        ("import nowhere\n", "encoder.py cannot be loaded: ModuleNotFoundError: No module named 'nowhere' (line 1)"),
    ],
)
def test_an_encoder_is_a_class_of_the_scenario(tmp_path: Path, text: str, problem: str | None):
    """It is loaded by the run; what is none ends it with one line."""
    directory = write_scenario(tmp_path / "s", train={**_STEP, "encoder": "encoder.py:Encoder"})
    (directory / "encoder.py").write_text(text)
    folder = load_scenario(directory)
    assert folder.scenario.train is not None
    assert "encoder.py" in folder.digests()
    if problem is None:
        assert type(encoder_of(folder, folder.scenario.train)).__name__ == "Encoder"
        return
    with pytest.raises(ScenarioError) as caught:
        encoder_of(folder, folder.scenario.train)
    assert problem in caught.value.message


def test_every_key_is_documented_with_its_default():
    """docs/training.md has a line for each key, in the order of the models."""
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    lines = re.findall(r"^- `(train\.[\w.]+)` \((.+?)\)", text, flags=re.MULTILINE)
    assert [(name, default.strip("`")) for name, default in lines] == [*_keys(TrainSpec, "train.")]


def _keys(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _keys(field.annotation, f"{prefix}{name}.")
        elif field.is_required():
            yield f"{prefix}{name}", "required"
        else:
            default = "none" if field.default is None else field.get_default(call_default_factory=True)
            yield f"{prefix}{name}", f"{default:g}" if isinstance(default, int | float) else str(default)


@pytest.mark.parametrize("train", [_STEP, {"batch": {"per_device": 2, "gradient_accumulation": 2}}])
def test_a_spec_is_read_back_as_it_was_written(tmp_path: Path, train: dict[str, Any]):
    """A run records it with all defaults, and `--resume` reads that."""
    spec = load_scenario(write_scenario(tmp_path / "s", train=train)).scenario.train
    assert spec is not None
    again = TrainSpec.model_validate(spec.model_dump(exclude_none=True))

    assert (again, again.budget) == (spec, 4)

"""`prompts_file`: many prompts in a file of their own."""

import tomllib
from pathlib import Path

import pytest
import tomli_w

from harness.errors import RunError, ScenarioError
from harness.suite.record.config import Overrides
from harness.suite.run.open_run import begin_run, resume_run
from harness.suite.scenarios.folder import load_scenario
from tests.harness_command import write_scenario

LINES = '{"text": "one\\u2028two", "metadata": {"turns": 2}}\n{"check_metadata": {"answer": [1, 2.5]}}\n'


def _scenario(tmp_path: Path, lines: str | None) -> Path:
    directory = write_scenario(tmp_path / "s")
    path = directory / "scenario.toml"
    keys = tomllib.loads(path.read_text())
    del keys["prompts"]
    path.write_text(tomli_w.dumps(keys | {"prompts_file": "x.jsonl"}))
    if lines is not None:
        (directory / "x.jsonl").write_text(lines, encoding="utf-8")
    return directory


def test_each_line_is_a_prompt_and_what_changes_in_the_file_is_noticed(tmp_path: Path):
    """It is part of what a resume goes on with; `--limit` takes the first ones."""
    directory = _scenario(tmp_path, LINES)
    scenario = load_scenario(directory).scenario
    begin_run(str(directory), Overrides(limit=1), tmp_path / "run")
    taken_up = resume_run(str(directory), Overrides(), tmp_path / "run").selection.folders[0]
    (directory / "x.jsonl").write_text(LINES.replace("one", "two"))

    assert [prompt.text for prompt in scenario.prompts] == ["one\u2028two", None]
    assert scenario.prompts[0].metadata == {"turns": 2}
    assert scenario.prompts[1].check_metadata == {"answer": [1, 2.5]}
    assert taken_up.scenario.session_count == 2
    with pytest.raises(RunError, match=r"prompts\[0\]\.text"):
        resume_run(str(directory), Overrides(), tmp_path / "run")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (None, "x.jsonl: No such file or directory"),
        ("", "x.jsonl:1: expected a prompt as JSON without null, got ''"),
        ('{"text": "a"}\n\n{"text": "b"}\n', "x.jsonl:2: expected a prompt as JSON"),
        ('{"text": 3}', "x.jsonl:1: text: expected a valid string, got 3"),
        ('{"txt": "a"}', "x.jsonl:1: txt: expected a known key, got 'txt'; did you mean 'text'?"),
        ('{"metadata": {"a": [null]}}', "expected a prompt as JSON without null"),
        (r'{"text": "\ud800"}', "x.jsonl:1: "),
        ("[" * 100_000, "x.jsonl:1: "),
        ('["a"]', "x.jsonl:1: "),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, lines: str | None, said: str):
    with pytest.raises(ScenarioError) as refused:
        load_scenario(_scenario(tmp_path, lines))
    assert said in refused.value.message


def test_prompts_stand_in_one_place(tmp_path: Path):
    directory = write_scenario(tmp_path / "s")
    path = directory / "scenario.toml"
    path.write_text('prompts_file = "x.jsonl"\n' + path.read_text())
    with pytest.raises(ScenarioError, match="got both"):
        load_scenario(directory)

"""A suite with a chat template of its own: the model sees it, the lock records it, and a resumed run keeps it."""

import hashlib
import json
from pathlib import Path

import pytest

from harness.errors import RunError, ScenarioError
from harness.suite.record.config import Overrides
from harness.suite.run.open_run import begin_run, resume_run
from harness.suite.scenarios.folder import load_scenario
from harness.tokens.tokenizer import Tokenizer
from tests.harness_command import harness, write_scenario
from tests.played_suites import play

pytestmark = pytest.mark.agent

TEMPLATE = (
    "{% for message in messages %}<|im_start|>({{ message.role }}) {{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>(assistant) {% endif %}"
)


def write_suite(directory: Path, template: str | None) -> Path:
    """A scenario, with `own.jinja` beside it."""
    engine = {"name": "scripted", "model": str(directory.parent / "toy"), "script": "script.toml"}
    scenario = write_scenario(directory, engine=engine | ({} if template is None else {"template": template}))
    (scenario / "own.jinja").write_text(TEMPLATE)
    return scenario


def prompts_in(run: Path, toy: Path) -> set[str]:
    """The beginnings of the samples, as text."""
    tokenizer = Tokenizer.load(toy)
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    return {tokenizer.decode(sample["tokens"])[:30] for sample in samples}


async def test_the_template_of_a_scenario_takes_the_place_of_the_models(tmp_path: Path):
    """A file of the scenario; `lock.json` has its digest."""
    scenario = write_suite(tmp_path / "s", "own.jinja")
    report = await play(scenario, tmp_path / "run")
    [(choice, identity)] = json.loads((tmp_path / "run" / "lock.json").read_text())["digests"].items()

    assert report.ledger.difference == 0
    assert prompts_in(tmp_path / "run", tmp_path / "toy") == {"<|im_start|>(user) Say somethi"}
    assert f"template={scenario / 'own.jinja'}" in choice
    assert identity["template_digest"] == hashlib.sha256(TEMPLATE.encode()).hexdigest()


def test_a_template_of_the_command_line_is_found_from_where_one_stands(tmp_path: Path):
    """It takes the place of the scenario's, too."""
    scenario = write_suite(tmp_path / "s", "chatml_hermes")
    ended = harness("run", scenario, "--template", "own.jinja", "--out", tmp_path / "run", cwd=scenario)

    assert ended.code == 0, ended.stderr
    assert prompts_in(tmp_path / "run", tmp_path / "toy") == {"<|im_start|>(user) Say somethi"}


def test_a_run_is_resumed_with_the_template_it_began_with(tmp_path: Path):
    """Neither another one nor the same file with other words in it."""
    scenario = write_suite(tmp_path / "s", "own.jinja")
    run = begin_run(str(scenario), Overrides(), tmp_path / "run").directory.path

    assert resume_run(str(run), Overrides(), None).directory.path == run
    with pytest.raises(RunError, match=r"overrides\.template: None -> 'chatml_hermes'"):
        resume_run(str(run), Overrides(template="chatml_hermes"), None)
    (scenario / "own.jinja").write_text(f"{TEMPLATE}\n")
    with pytest.raises(RunError, match=r"files\.own\.jinja"):
        resume_run(str(run), Overrides(), None)


def test_a_template_that_there_is_not_is_said_by_its_key(tmp_path: Path):
    """With the names of ours."""
    with pytest.raises(ScenarioError, match=r"engine\.template: no chat template 'magic'; expected a file, or one of"):
        load_scenario(write_suite(tmp_path / "s", "magic"))

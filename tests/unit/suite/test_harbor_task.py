"""Tasks in Harbor's format: what is read, and what a wrong one says before anything runs."""

from pathlib import Path

import pytest
import tomli_w

from harness.errors import ScenarioError
from harness.suite.exits import ExitCode, NothingSelected, exit_code_of
from harness.suite.judge.trial import read_rewards
from harness.suite.record.config import Overrides, select
from harness.suite.tasks.harbor_task import HarborTask
from harness.types import Json
from tests.harness_command import harness


def _task(directory: Path, dockerfile: str | None = None, **keys: object) -> Path:
    for name in ("tests", "environment", "solution"):
        (directory / name).mkdir(parents=True)
    (directory / "task.toml").write_text(tomli_w.dumps({"version": "1.0", "metadata": {"category": "any"}, **keys}))
    (directory / "instruction.md").write_text("Do it.")
    for script in ("tests/test.sh", "solution/solve.sh"):
        (directory / script).write_text("#!/bin/sh")
    if dockerfile is not None:
        (directory / "environment/Dockerfile").write_text(dockerfile)
    return directory


@pytest.mark.parametrize(
    ("dockerfile", "environment", "workdir"),
    [
        (None, {}, "/app"),
        ("FROM a\nWORKDIR /one\nFROM b\n workdir /two\n", {}, "/two"),
        ("FROM a\nWORKDIR /one\n", {"workdir": "/three"}, "/three"),
    ],
)
def test_work_begins_where_the_task_says(tmp_path: Path, dockerfile: str | None, environment: Json, workdir: str):
    assert HarborTask.load(_task(tmp_path / "a", dockerfile, environment=environment)).workdir == workdir


def test_variables_of_this_machine_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As `${NAME}`, or with a default."""
    task = HarborTask.load(_task(tmp_path / "a"))
    monkeypatch.setenv("THERE", "here")
    monkeypatch.delenv("GONE", raising=False)

    assert task.variables({"A": "${THERE}/b", "B": "${GONE:-c}"}) == {"A": "here/b", "B": "c"}
    with pytest.raises(ScenarioError, match="expected the environment variable GONE, got none"):
        task.variables({"A": "${GONE}"})


@pytest.mark.parametrize(
    ("keys", "gone", "said"),
    [
        ({}, "tests/test.sh", "expected tests/test.sh, got none: nothing can be verified"),
        ({}, "instruction.md", "instruction.md: No such file or directory"),
        ({"verifier": {"timeout_sec": "soon"}}, "", "verifier.timeout_sec: "),
        ({"steps": [{"name": "one"}]}, "", "expected a task of one step on Linux, got steps"),
        ({"environment": {"os": "windows", "gpus": 2}}, "", "got environment.gpus, os = 'windows'"),
        ({"agent": {"user": "ada"}, "verifier": {"user": "root"}}, "", "got agent.user, verifier.user;"),
        ({"verifier": {"environment": {}, "collect": [{}]}}, "", "got verifier.environment, verifier.collect;"),
        ({"environment": {"healthcheck": {"command": "a"}}}, "", "got environment.healthcheck;"),
        ({"environment": {"mcp_servers": [{"name": "a"}], "tpu": {"type": "a"}}}, "", "environment.mcp_servers;"),
        ({"environment": {"workdir": "app"}}, "", "environment.workdir: "),
        ({"environment": {"cpus": 0}}, "", "environment.cpus: "),
        ({"environment": {"memory_mb": 8}}, "", "environment.memory_mb: "),
        ({"environment": {"memory": "8 MB"}}, "", "environment.memory"),
        ({"environment": {"memory": "much"}}, "", "got 'much'"),
        (
            {"environment": {"docker_image": "a"}},
            "solution/solve.sh",
            "expected solution/solve.sh for the agent oracle",
        ),
        ({"verifier": {"env": {"A": "${NO_SUCH_VARIABLE}"}}}, "", "expected the environment variable NO_SUCH_VARIABLE"),
    ],
)
def test_a_task_that_cannot_run_here_is_named(tmp_path: Path, keys: Json, gone: str, said: str):
    directory = _task(tmp_path / "tasks/a", **keys)
    if gone:
        (directory / gone).unlink()
    with pytest.raises(ScenarioError) as refused:
        select(str(tmp_path / "tasks"), Overrides())
    assert said in refused.value.message


@pytest.mark.parametrize(
    ("kind", "said"), [("podman", "expected environment/Dockerfile"), ("a:b", "expected an image")]
)
def test_a_task_without_an_image_is_named(tmp_path: Path, kind: str, said: str):
    directory = _task(tmp_path / "a")
    with pytest.raises(ScenarioError, match=said):
        select(str(directory), Overrides(settings=[f'agent.sandbox.kind="{kind}"']))


@pytest.mark.parametrize(("memory", "size"), [("2G", 2048), ("512m", 512), ("1.5 GB", 1536)])
def test_sizes_of_older_tasks_count(tmp_path: Path, memory: str, size: int):
    assert HarborTask.load(_task(tmp_path / "a", environment={"memory": memory})).keys.environment.memory_mb == size


@pytest.mark.parametrize(
    "mark", ["<!-- harbor-canary GUID 1 -->\n", "<!-- harbor-canary 1 -->\n# harbor-canary 2\n\n \n"]
)
def test_no_agent_learns_a_canary(tmp_path: Path, mark: str):
    directory = _task(tmp_path / "a")
    (directory / "instruction.md").write_text(f"{mark}# Do it\n<!-- harbor-canary 3 -->\n")
    assert HarborTask.load(directory).instruction == "# Do it\n<!-- harbor-canary 3 -->\n"


def test_a_folder_of_tasks_is_a_suite(tmp_path: Path):
    """Rows of which are filtered by the task's name; a task alone is one too."""
    for name in ("b", "a"):
        _task(tmp_path / "Some Tasks" / name, "FROM a")
    folder = select(str(tmp_path / "Some Tasks"), Overrides(filter=["metadata.task=b"], agent="nop")).folders[0]
    alone = select(str(tmp_path / "Some Tasks/a"), Overrides()).folders[0]

    assert (folder.name, folder.scenario.agent.name, folder.session_count) == ("some-tasks", "nop", 1)
    assert folder.prompts.read(0).text == "Do it."
    assert (alone.name, alone.scenario.agent.name, alone.session_count) == ("a", "oracle", 1)


def test_another_agent_plays_a_model(tmp_path: Path):
    scenario = select(str(_task(tmp_path / "a", "FROM a")), Overrides(agent="react_chat")).folders[0].scenario
    assert (scenario.agent.profile, scenario.engine.name) == ("react_chat", "local")


def test_another_agent_replaces_the_agent_alone(tmp_path: Path):
    """Whatever it was, and not the engine's script."""
    directory = _task(tmp_path / "tasks/a", "FROM a").parent
    scenario = {"schema_version": 1, "name": "s", "description": "", "harbor": ".", "engine": {"script": "script.json"}}
    scenario["agent"] = {"command": ["sh", "-c", "true"], "sandbox": {"kind": "bwrap"}}
    (directory / "script.json").write_text('{"steps": [{"text": "a"}]}')
    (directory / "scenario.toml").write_text(tomli_w.dumps(scenario))
    found = select(str(directory), Overrides(agent="react_chat", engine="scripted")).folders[0].scenario

    assert (found.agent.name, found.agent.command, found.engine.script) == ("react_chat", [], "script.json")


@pytest.mark.xdist_group("command")
def test_no_task_is_nothing_to_run(tmp_path: Path):
    ended = harness("run", "--harbor", tmp_path)
    assert ended.code == exit_code_of(NothingSelected("")) == ExitCode.NOTHING_SELECTED
    assert "expected scenario.toml or task.toml" in ended.stderr
    assert "expected a scenario, a suite or --harbor DIR" in harness("run").stderr


@pytest.mark.parametrize(
    ("name", "content", "reward", "figures"),
    [
        ("reward.txt", "0.5\n", 0.5, {}),
        ("reward.json", '{"reward": 1, "tests": 3}', 1.0, {"tests": 3}),
        ("reward.json", '{"score": 0.25}', 0.25, {"score": 0.25}),
        ("reward.json", "1", 1.0, {}),
    ],
)
def test_rewards_are_read(tmp_path: Path, name: str, content: str, reward: float, figures: Json):
    (tmp_path / name).write_text(content)
    score = read_rewards(tmp_path)
    assert (score.reward, score.figures) == (reward, figures)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("reward.txt", ""),
        ("reward.txt", "nan"),
        ("reward.json", "[]"),
        ("reward.json", '{"a": 1, "b": 2}'),
        ("reward.json", '{"reward": "1"}'),
        ("reward.json", '{"reward": true}'),
        ("reward.json", "{"),
        ("reward.json", "\udcff"),
        ("reward.json", '{"reward": 1' + "0" * 400 + "}"),
        ("reward.json", "[" * 100_000),
        ("reward.json", '{"reward": 1, "x": "\\ud800"}'),
        ("reward.json", '{"reward": 1, "\\ud800": 2}'),
        ("reward.json", '{"reward": 1, "x": NaN}'),
        ("reward.json", '{"reward": 1, "x": "well"}'),
        ("reward.txt", "1" * 400),
    ],
)
def test_another_verdict_is_none(tmp_path: Path, name: str, content: str):
    (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ScenarioError, match="expected"):
        read_rewards(tmp_path)


def test_a_link_is_no_verdict(tmp_path: Path):
    """Programs of the agent's may have made it."""
    (tmp_path / "secret").write_text("1")
    (tmp_path / "reward.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(ScenarioError, match="got neither"):
        read_rewards(tmp_path)

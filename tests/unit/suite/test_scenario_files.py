"""What is wrong with a scenario is said by file, key, expectation and value."""

import json
import subprocess
import tomllib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from harness.errors import ScenarioError
from harness.rollouts.agents.task import ProgramAgent
from harness.suite.exits import NothingSelected
from harness.suite.scenarios.folder import bundled_scenarios, find_scenarios, load_scenario
from harness.suite.scenarios.plan import open_agent
from harness.suite.scenarios.scenario import Scenario
from tests.harness_command import write_scenario

AN_AGENT = "expected a bundled agent, a script, a profile or a command"


def problems_of(directory: Path) -> list[str]:
    """What is said of a scenario that cannot be loaded, line by line, without the name of its file."""
    with pytest.raises(ScenarioError) as caught:
        load_scenario(directory)
    prefix = f"{directory / 'scenario.toml'}: "
    return [line.removeprefix(prefix) for line in caught.value.message.splitlines()]


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"sede": 2}, "sede: expected a known key, got 'sede'; did you mean 'seed'?"),
        ({"limits": {"turn": 3}}, "limits.turn: expected a known key, got 'turn'; did you mean 'turns'?"),
        ({"prompts": [{"txt": "a"}]}, "prompts[0].txt: expected a known key, got 'txt'; did you mean 'text'?"),
        ({"schema_version": 2}, "schema_version: expected 1, got 2"),
        ({"seed": "7"}, "seed: expected a valid integer, got '7'"),
        ({"limits": {"turns": 0}}, "limits.turns: expected greater than or equal to 1, got 0"),
        ({"after_incomplete": "stop"}, "after_incomplete: expected 'refuse' or 'serve', got 'stop'"),
        ({"agent": {}}, "agent: expected one of profile, command and function, got {}"),
        (
            {"agent": {"command": ["no-such-program", "x"]}},
            "agent.command: expected a program of its folder or of PATH, got 'no-such-program'",
        ),
        (
            {"agent": {"profile": "plain_chta"}},
            f"agent.profile: {AN_AGENT}, got 'plain_chta'; did you mean 'plain_chat'?",
        ),
        (
            {"agent": {"profile": "agent.py", "game": "gone.py"}},
            "agent.game: expected a file of the scenario, got 'gone.py', which does not exist",
        ),
    ],
)
def test_a_wrong_key_is_one_line(tmp_path: Path, keys: dict[str, object], problem: str):
    """File, key, what was expected, what came, and the closest key there is."""
    assert problems_of(write_scenario(tmp_path / "s", **keys)) == [problem]


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (
            {"agent": {"function": "play.py:run", "profile": "plain_chat"}},
            "agent: expected one of profile, command and function, ",
        ),
        ({"agent": {"function": "play.py:run", "game": "g.py"}}, "agent: expected no game with function, which has no"),
        ({"agent": {"function": "play.py"}}, "agent.function: expected FILE.py:NAME, got 'play.py'"),
        (
            {"agent": {"function": "gone.py:run"}},
            "agent.function: expected a file of the scenario, got 'gone.py', which",
        ),
        (
            {"agent": {"function": "play.py:go"}},
            "agent.function: expected an `async def go` at the top level of play.py,",
        ),
        (
            {"agent": {"function": "play.py:run"}, "faults": [{"action": "kill_agent", "at_turn": 1}]},
            "file: expected no kill_agent with agent.function, which has no process of its own",
        ),
    ],
)
def test_a_function_that_cannot_play_is_refused(tmp_path: Path, keys: dict[str, Any], problem: str):
    """Before anything runs: two agents, a file that is not there, and faults that signal processes."""
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "play.py").write_text("async def run(**kwargs): ...")
    [said] = problems_of(write_scenario(tmp_path / "s", **keys))

    assert said.startswith(problem)


@pytest.mark.parametrize("changed", ["play.py", "game.py"])
def test_a_function_is_known_by_every_file_beside_it(tmp_path: Path, changed: str):
    """It may import any of them, so a run that is taken up notices the change."""
    directory = write_scenario(tmp_path / "s", agent={"function": "play.py:run"})
    (directory / "play.py").write_text("async def run(**kwargs): ...")
    (directory / "game.py").write_text("ROOMS = 12")
    before = load_scenario(directory).digests()
    (directory / changed).write_text((directory / changed).read_text() + "\n")

    assert {name for name, digest in load_scenario(directory).digests().items() if before[name] != digest} == {changed}


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (
            {"engine": {}, "services": {"lanes": [{"engine": "sglang"}, {"engine": "vllm"}]}},
            "services: expected router = true with lanes of several engines (sglang, vllm)",
        ),
        ({"engine": {}, "services": {"lanes": [{"engine": "tgi"}]}}, "services.lanes[0].engine: expected 'sglang',"),
        ({"engine": {}, "services": {"lanes": [{"engine": "vllm", "count": 0}]}}, "services.lanes[0].count: expected"),
        ({"engine": {}, "services": {"lanes": []}}, "services: expected lanes or workers"),
        (
            {"engine": {}, "services": {"workers": ["vllm"], "router": True}},
            "services.workers[0]: expected a server that",
        ),
        (
            {"engine": {}, "services": {"workers": ["vllm=http://127.0.0.1:1"]}},
            "services: expected router = true with workers",
        ),
        (
            {"engine": {"name": "scripted"}, "services": {"lanes": [{"engine": "vllm"}]}},
            "file: expected engine.name or services, and not both",
        ),
        ({"engine": {"force_script": True}}, "file: expected engine.script with engine.force_script"),
        (
            {"engine": {"script": "script.toml"}, "services": {"lanes": [{"engine": "vllm"}]}},
            "file: expected no engine.script with services without engine.force_script",
        ),
    ],
)
def test_services_that_cannot_be_are_refused(tmp_path: Path, keys: dict[str, Any], problem: str):
    """A mix without a router, an engine that is no lane, and two engines for one scenario."""
    [said] = problems_of(write_scenario(tmp_path / "s", **keys))

    assert said.startswith(problem)


def test_every_problem_is_reported_at_once(tmp_path: Path):
    assert len(problems_of(write_scenario(tmp_path / "s", seed=-1, concurrency=0, nmae="x"))) == 3


def test_a_prompt_needs_a_text_from_somewhere(tmp_path: Path):
    """`instruction.md` or the prompt itself."""
    directory = write_scenario(tmp_path / "s", prompts=[{"text": "Hello."}, {}])
    (directory / "instruction.md").unlink()

    assert problems_of(directory) == ["prompts[1].text: expected a text, got nothing; give one or write instruction.md"]


@pytest.mark.parametrize("content", [b"seed = ", b"\xff\xfe"])
def test_a_file_that_is_not_toml_is_named(tmp_path: Path, content: bytes):
    directory = write_scenario(tmp_path / "s")
    (directory / "scenario.toml").write_bytes(content)

    assert len(problems_of(directory)) == 1


def test_a_suite_is_a_folder_of_scenarios(tmp_path: Path):
    """Sorted by folder; a single scenario is found by its folder or its file."""
    for name in ("b", "a"):
        write_scenario(tmp_path / "suite" / name)

    assert [folder.name for folder in find_scenarios(str(tmp_path / "suite"))] == ["a", "b"]
    assert [folder.name for folder in find_scenarios(str(tmp_path / "suite" / "a" / "scenario.toml"))] == ["a"]


def test_an_empty_suite_selects_nothing(tmp_path: Path):
    """Which is not the same as a suite that is not there."""
    with pytest.raises(NothingSelected):
        find_scenarios(str(tmp_path))
    with pytest.raises(ScenarioError, match="did you mean 'quickstart'"):
        find_scenarios("quikstart")


def test_names_are_unique_in_a_suite(tmp_path: Path):
    for folder in ("a", "b"):
        write_scenario(tmp_path / folder, name="same")
    with pytest.raises(ScenarioError, match="expected different names"):
        find_scenarios(str(tmp_path))


def test_the_bundled_scenarios_are_right():
    folders = {folder.name: folder for folder in bundled_scenarios()}

    assert {"quickstart", "long_session", "length_limited", "weight_updates"} <= set(folders)
    assert folders["quickstart"].session_count >= 8
    assert all(folder.check for folder in folders.values())


def test_the_schema_describes_every_key_a_bundled_scenario_uses():
    schema = json.dumps(Scenario.model_json_schema())
    for folder in bundled_scenarios():
        keys = tomllib.loads((folder.directory / "scenario.toml").read_text())
        assert all(f'"{key}"' in schema for key in keys)


PROFILE = """
schema_version = 1
description = "Plays."
dialect = "openai_chat"
command = ["agent.sh", "--loud"]
"""


def test_a_profile_of_any_name_is_read_when_the_scenario_is(tmp_path: Path):
    """With its file and key; one that installs nothing needs no lock file and no version command."""
    scenario = write_scenario(tmp_path / "s", agent={"profile": "mine.toml"})
    profile = scenario / "mine.toml"
    assert f"{AN_AGENT}, got 'mine.toml'" in problems_of(scenario)[0]
    for text, words in (
        (PROFILE.replace("command", "comand"), "comand"),
        (PROFILE + '\n[install]\nkind = "python"\npackage = "x"\n', "version_command: expected a command"),
        ("[", "mine.toml"),
        (PROFILE, "command: expected a program of its folder or of PATH, got 'agent.sh'"),
    ):
        profile.write_text(text)
        with pytest.raises(ScenarioError, match=words) as refused:
            load_scenario(scenario)
        assert str(profile) in refused.value.message
    profile.write_text(PROFILE.replace("agent.sh", "sh"))
    assert load_scenario(scenario).agent_script == profile


@pytest.mark.parametrize(
    ("name", "problem"), [("gone.txt", "does not exist"), ("../s/agent.py", "leaves it"), ("/etc/passwd", "leaves it")]
)
def test_files_of_an_agent_are_in_the_folder(tmp_path: Path, name: str, problem: str):
    scenario = write_scenario(tmp_path / "s", agent={"command": ["true"], "files": [name]})
    expected = f"agent.files: expected a file or folder in {scenario}, got {name!r}, which {problem}"
    assert problems_of(scenario) == [expected]


async def test_a_command_has_its_files_setup_and_directory(tmp_path: Path):
    """A word that names a copied file stays relative; a changed copy changes the digests."""
    agent = {
        "command": ["sh", "tools/run.sh", "own.sh"],
        "files": ["tools"],
        "setup": ["touch", "ready"],
        "cwd": "work",
    }
    scenario = write_scenario(tmp_path / "s", agent=agent)
    (scenario / "tools" / "deep").mkdir(parents=True)
    for name in ("tools/run.sh", "tools/deep/data", "own.sh"):
        (scenario / name).write_text(name)
    folder = load_scenario(scenario)
    async with open_agent(folder) as opened:
        assert isinstance(opened, ProgramAgent)

    assert Path(opened.command[0]).is_absolute()
    assert opened.command[1:] == ("tools/run.sh", str(scenario / "own.sh"))
    assert (opened.setup, opened.cwd) == (("touch", "ready"), "work")
    assert opened.files == {"tools": scenario / "tools"}
    before = folder.digests()
    assert {"files/tools/run.sh", "files/tools/deep/data"} <= before.keys()
    (scenario / "tools" / "deep" / "data").write_text("changed")
    assert folder.digests() != before


@pytest.mark.parametrize("how", ["mine.toml", "agent.sh", "sh agent.sh", "./agent.sh"])
async def test_any_command_plays_a_scenario(tmp_path: Path, how: str):
    """A profile without [install], a program of the scenario's folder, and a command line."""
    scenario = write_scenario(tmp_path / "s", agent={"profile": how})
    (scenario / "mine.toml").write_text(PROFILE)
    (scenario / "agent.sh").write_text('#!/bin/sh\necho "I am $*"\n')
    with nullcontext() if how.startswith("sh ") else pytest.raises(ScenarioError, match="expected a program"):
        load_scenario(scenario)
    (scenario / "agent.sh").chmod(0o755)
    folder = load_scenario(scenario)
    async with open_agent(folder) as agent:
        assert isinstance(agent, ProgramAgent)
        said = subprocess.run(
            agent.command, capture_output=True, text=True, check=True, cwd=tmp_path, timeout=30
        ).stdout

    assert said == ("I am --loud\n" if how == "mine.toml" else "I am \n")
    before = folder.digests()
    (scenario / "agent.sh").write_text("#!/bin/sh\n")
    assert folder.digests() != before

"""An agent with a profile plays for a trainer as it does anywhere: with its programs, its variables, its sessions."""

import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.adapters.areal.trajectory import trajectory_columns
from harness.adapters.episodes import Episodes, EpisodeSettings
from harness.adapters.miles.rollouts import find_agent, make_task
from harness.adapters.miles.settings import read_settings
from harness.engines.scripted import ScriptStep
from harness.errors import AdapterError
from harness.rollouts.agents.task import ProgramAgent
from harness.samples.rollout import OutcomeKind
from harness.types import Json
from tests.unit.adapters.miles_runs import miles_args, miles_run
from tests.unit.rollouts.test_profile import PROFILE, written

COMMAND = '["python", "${HARNESS_AGENT_FOLDER}/play.py"]'
SESSION = """
[env]
MOOD = "calm"
ADDRESS = "${OPENAI_BASE_URL}/chat/completions"

[session]
matching = ["trimmed"]
"""
PROGRAM = """
import json, os, sys, urllib.request

def ask(*messages):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    with urllib.request.urlopen(urllib.request.Request(os.environ["ADDRESS"], body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

task = {"role": "user", "content": os.environ["HARNESS_INSTRUCTION"]}
said = {"role": "assistant", "content": ask(task) + "  "}
ask(task, said, {"role": "user", "content": "Go on."})
ask({"role": "user", "content": "Write a title."})
with open(os.environ["HARNESS_RESULT_FILE"], "w") as file:
    json.dump({"mood": os.environ["MOOD"], "prefix": sys.prefix}, file)
"""

STEPS = (ScriptStep(text="One moment."), ScriptStep(text="Done."), ScriptStep(text="Moments"))
PROMPT = [{"role": "user", "content": "Do it."}]

pytestmark = pytest.mark.usefixtures("trainers")


@pytest.fixture(name="profile")
def _profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a program that asks two questions and, besides, for a title; in a cache of its own."""
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    text = PROFILE.replace('["python", "-c", "print()"]', COMMAND)
    folder = written(tmp_path / "titled", SESSION, profile=text)
    (folder / "play.py").write_text(PROGRAM)
    return folder / "profile.toml"


@pytest.mark.agent
async def test_a_profile_plays_for_a_trainer(profile: Path, tmp_path: Path) -> None:
    """Its own Python is found, its variables are there, and the side call that came last is not what is trained."""
    async with miles_run(*STEPS) as run:
        episodes = Episodes(EpisodeSettings.read(run.server.url, str(profile), agent_env={"MOOD": "merry"}))
        try:
            rollout = await episodes.run(PROMPT, {}, {"temperature": 1.0}, None)
        finally:
            await episodes.close()

    assert rollout.outcome.kind is OutcomeKind.FINISHED, rollout.outcome
    assert rollout.agent_result is not None
    assert rollout.agent_result["mood"] == "merry"
    assert rollout.agent_result["prefix"].startswith(str(tmp_path / "cache"))
    [sample] = rollout.samples
    assert sample.metadata["turns"] == [0, 1]  # one branch: the white space at the end did not count
    assert [turn["role"] for turn in rollout.session["turns"]] == ["main", "main", "side"]
    assert trajectory_columns(sample, 1.0, 0)["loss_mask"].sum() == sample.loss_mask.sum() > 0


async def test_a_command_line_plays_for_a_trainer(tmp_path: Path) -> None:
    """It needs no profile, in any adapter; a word that is a file is that file."""
    address = 'os.environ["OPENAI_BASE_URL"] + "/chat/completions"'
    (tmp_path / "play.py").write_text(PROGRAM.replace('os.environ["ADDRESS"]', address))
    command = shlex.join((sys.executable, str(tmp_path / "play.py")))
    settings = read_settings(miles_args("--harness-session-server", "http://s", "--harness-agent", command))
    assert find_agent(settings, lambda _: None) == (sys.executable, str(tmp_path / "play.py"))
    async with miles_run(*STEPS) as run:
        episodes = Episodes(EpisodeSettings.read(run.server.url, command, agent_env={"MOOD": "merry"}))
        try:
            rollout = await episodes.run(PROMPT, {}, {"temperature": 1.0}, None)
        finally:
            await episodes.close()

    assert rollout.outcome.kind is OutcomeKind.FINISHED, rollout.outcome
    assert rollout.agent_result == {"mood": "merry", "prefix": sys.prefix}


@pytest.mark.parametrize("name", ["no-such-agent", "no_such_program --x", "agent.py", './gone "'])
def test_what_is_no_program_is_refused(name: str) -> None:
    with pytest.raises(AdapterError, match="agent: "):
        EpisodeSettings.read("http://s", name, agent_env={"A": "b"})


@pytest.mark.parametrize(
    ("options", "stated"),
    [
        ((), {}),
        (("--harness-matching", "trimmed"), {"matching": ["trimmed"]}),
        (("--harness-selection", "leaves"), {"selection": "all"}),
        (("--harness-selection", "one"), {"selection": "one"}),
    ],
)
def test_a_session_says_of_itself_what_the_operator_has_said(
    tmp_path: Path, options: tuple[str, ...], stated: Json
) -> None:
    """And nothing else: it would stand over what the profile of the agent says."""
    settings = read_settings(miles_args("--harness-session-server", "http://s", "--harness-agent", "pi", *options))
    sample: Any = SimpleNamespace(index=0, group_index=0, prompt=PROMPT, metadata={})
    task = make_task(settings, ProgramAgent("pi", ("pi",)), sample, {"temperature": 1.0}, tmp_path)
    assert task.session == {"sampling": {"temperature": 1.0}} | stated

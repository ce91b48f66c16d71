"""An agent gets what it needs to find its model, and nothing of ours."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from harness.machine.disk import make_way
from harness.rollouts.agents.agent_environment import (
    HOME,
    INSTRUCTION_FILE,
    LOG_FILE,
    MAX_VARIABLE_BYTES,
    METADATA_FILE,
    REQUEST_KWARGS_FILE,
    RESULT_FILE,
    agent_environment,
    prepare_home,
    prepare_workdir,
    without_session,
)
from harness.rollouts.agents.agent_output import AgentLog
from harness.rollouts.agents.task import AgentTask, ProgramAgent
from harness.rollouts.client.session_server import SessionHandle

SESSION = SessionHandle("a1b2", "http://gpu-host:8000/sessions/a1b2", "sk-session")


def task_of(prompt: Any = "Guess.", workdir: Path = Path("/run/0"), **agent_env: str) -> AgentTask:
    """A task for a program."""
    agent = ProgramAgent("probe", ("probe",), agent_env)
    return AgentTask(agent, prompt, workdir, "smollm2", request_kwargs={"temperature": 1}, metadata={"n": 2})


def environment(parent: dict[str, str] | None = None, *, prompt: Any = "Guess.", **agent_env: str) -> dict[str, str]:
    """The environment of an agent whose harness has the environment `parent`."""
    task = task_of(prompt, **agent_env)
    assert isinstance(task.agent, ProgramAgent)
    return agent_environment(task.agent, task, SESSION, parent or {})


def test_a_client_finds_its_session():
    """By the variables that clients of each API read."""
    env = environment()

    assert env["OPENAI_BASE_URL"] == "http://gpu-host:8000/sessions/a1b2/v1"
    assert (env["OPENAI_API_KEY"], env["OPENAI_MODEL"]) == ("sk-session", "smollm2")
    assert env["ANTHROPIC_BASE_URL"] == "http://gpu-host:8000/sessions/a1b2"
    assert (env["ANTHROPIC_API_KEY"], env["ANTHROPIC_MODEL"]) == ("sk-session", "smollm2")


def test_the_task_is_handed_over():
    """Instruction, metadata and arguments, as text, JSON and file names."""
    env = environment()

    assert env["HARNESS_INSTRUCTION"] == "Guess."
    assert env["HARNESS_INSTRUCTION_FILE"] == "/run/0/instruction.md"
    assert env["HARNESS_RESULT_FILE"] == "/run/0/result.json"
    assert json.loads(env["HARNESS_REQUEST_KWARGS"]) == {"temperature": 1}
    assert json.loads(env["HARNESS_METADATA"]) == {"n": 2}
    assert env["HARNESS_METADATA_FILE"] == "/run/0/metadata.json"
    assert (env["HARNESS_SESSION_ID"], env["HARNESS_MODEL"]) == ("a1b2", "smollm2")


@pytest.mark.parametrize(
    "name",
    [
        "OPENAI_ORG_ID",
        "ANTHROPIC_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "HF_TOKEN",
        "UV_PUBLISH_TOKEN",
        "UV_INDEX_X_PASSWORD",
        "UV_INDEX_X_USERNAME",
        "PYTHONPATH",
        "VIRTUAL_ENV",
        "HARNESS_ADMIN_TOKEN",
    ],
)
def test_secrets_and_settings_of_the_harness_stay_at_home(name: str):
    assert environment({name: "secret"}).get(name) != "secret"


@pytest.mark.parametrize("name", ["PATH", "HOME", "LC_ALL", "SSL_CERT_FILE", "UV_CACHE_DIR", "HTTPS_PROXY"])
def test_what_programs_need_to_run_passes(name: str):
    assert environment({name: "value"})[name] == "value"


@pytest.mark.parametrize(
    ("name", "value", "passed"),
    [
        ("PIP_INDEX_URL", "https://user:s3cret@index.example/simple", "https://index.example/simple"),
        (
            "PIP_EXTRA_INDEX_URL",
            "https://s3cret@a.example https://u:s3cret@b.example/x",
            "https://a.example https://b.example/x",
        ),
        ("UV_INDEX", "corp=https://u:p@s3cret@index.example/simple", "corp=https://index.example/simple"),
        ("HTTPS_PROXY", "http://user:s3cret@proxy:3128", "http://proxy:3128"),
        ("https_proxy", "user:s3cret@proxy:3128", "proxy:3128"),
        ("PATH", "/opt/node@18/bin", "/opt/node@18/bin"),
        ("UV_DEFAULT_INDEX", "https://index.example/a@b", "https://index.example/a@b"),
        ("LC_ALL", "de_DE@euro", "de_DE@euro"),
    ],
)
def test_no_secret_of_a_url_passes(name: str, value: str, passed: str):
    """The index and the proxy do; whoever needs a password for them gives it in the profile."""
    assert environment({name: value})[name] == passed


def test_the_session_server_is_exempt_from_proxies():
    """A proxy for the internet must not get the agent's model calls."""
    env = environment({"HTTP_PROXY": "http://proxy:3128", "NO_PROXY": "localhost"})

    assert env["NO_PROXY"] == env["no_proxy"] == "localhost,gpu-host"


def test_the_agents_own_settings_win():
    assert environment(OPENAI_MODEL="another", HARNESS_GAME="/g.py")["OPENAI_MODEL"] == "another"


@pytest.mark.parametrize("prompt", ["x" * (MAX_VARIABLE_BYTES + 1), "nul \0 byte"])
def test_an_instruction_that_no_variable_can_hold_is_in_the_file_only(prompt: str, tmp_path: Path):
    prepare_workdir(task_of(prompt, tmp_path))

    assert "HARNESS_INSTRUCTION" not in environment(prompt=prompt)
    assert (tmp_path / "instruction.md").read_text() == prompt


@pytest.mark.parametrize("part", ["metadata", "request_kwargs"])
def test_an_object_that_no_variable_can_hold_is_in_the_file_only(part: str, tmp_path: Path):
    """The kernel refuses the start of a process whose variable is longer than 128 KiB."""
    agent = ProgramAgent("probe", ("probe",))
    value = {"tests": "x" * MAX_VARIABLE_BYTES}
    task = AgentTask(agent, "Guess.", tmp_path, "smollm2", **{part: value})
    prepare_workdir(task)
    env = agent_environment(agent, task, SESSION, {})

    assert f"HARNESS_{part.upper()}" not in env
    assert json.loads(Path(env[f"HARNESS_{part.upper()}_FILE"]).read_text()) == value


def test_a_result_of_an_earlier_attempt_is_not_found(tmp_path: Path):
    (tmp_path / "result.json").write_text("{}")
    prepare_workdir(task_of(workdir=tmp_path))

    assert not (tmp_path / "result.json").exists()


def test_messages_are_handed_over_as_a_file(tmp_path: Path):
    """A conversation is no instruction: an agent that knows only instructions finds none, and no half of it."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Guess."}]
    env = environment(prompt=messages)
    prepare_workdir(task_of(messages, tmp_path))

    assert env["HARNESS_MESSAGES_FILE"] == "/run/0/messages.json"
    assert not {"HARNESS_INSTRUCTION", "HARNESS_INSTRUCTION_FILE"} & env.keys()
    assert json.loads((tmp_path / "messages.json").read_text()) == messages
    assert not (tmp_path / "instruction.md").exists()


def test_one_text_of_the_users_is_an_instruction(tmp_path: Path):
    """However it was spelled; without messages there is no file of them."""
    env = environment(prompt=[{"role": "user", "content": "Guess."}])
    prepare_workdir(task_of([{"role": "user", "content": "Guess."}], tmp_path))

    assert (env["HARNESS_INSTRUCTION"], env["HARNESS_MESSAGES_FILE"]) == ("Guess.", "/run/0/messages.json")
    assert (tmp_path / "instruction.md").read_text() == "Guess."
    assert "HARNESS_MESSAGES_FILE" not in environment()


def test_an_agent_with_a_home_of_its_own_sees_none_of_the_users() -> None:
    """Neither by HOME nor by the folders that may lie elsewhere; its variables may use each other."""
    parent = {"HOME": "/home/me", "XDG_CONFIG_HOME": "/home/me/config", "PATH": "/bin"}
    agent = ProgramAgent("probe", ("probe",), {"A": "${HOME}/a", "B": "${A}b ${OPENAI_API_KEY}"}, home={})
    task = AgentTask(agent, "Guess.", Path("/run/0"), "smollm2")
    env = agent_environment(agent, task, SESSION, parent)

    assert env["HOME"] == "/run/0/.home"
    assert "XDG_CONFIG_HOME" not in env
    assert (env["A"], env["B"]) == ("/run/0/.home/a", "/run/0/.home/ab sk-session")


def test_the_session_is_taken_out_under_every_name() -> None:
    agent = ProgramAgent("probe", ("probe",), {"MY_URL": "${OPENAI_BASE_URL}", "MY_KEY": "${OPENAI_API_KEY}"}, home={})
    env = agent_environment(agent, task_of(), SESSION, {"PATH": "/bin"})
    left = without_session(env, SESSION)

    assert (env["MY_URL"], env["MY_KEY"]) == ("http://gpu-host:8000/sessions/a1b2/v1", "sk-session")
    assert env.keys() - left.keys() == {
        *("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_API_BASE", "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL"),
        *("GEMINI_API_KEY", "GOOGLE_GEMINI_BASE_URL", "HARNESS_SESSION_ID", "MY_URL", "MY_KEY"),
    }


def test_files_of_a_home_are_for_nobody_else(tmp_path: Path) -> None:
    """They hold a key; those of an attempt before are gone."""
    home, task = tmp_path / ".home", task_of(workdir=tmp_path)
    prepare_home({"old": ""}, task, {})
    prepare_home({".agent/config.json": '{"key": "${KEY}"}'}, task, {"KEY": 'a"b'})

    assert home.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in home.iterdir()] == [".agent"]
    assert json.loads((home / ".agent/config.json").read_text()) == {"key": 'a"b'}


def test_links_of_an_earlier_agent_are_not_followed(tmp_path: Path) -> None:
    """A rollout that continues uses its directory again, and writes as a user who may own more than the agent does."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("kept")
    source = tmp_path / "source"
    source.mkdir()
    (source / "data").write_text("copied")
    agent = ProgramAgent("probe", ("probe",), files={"data/deep/file": source / "data", "folder": source})
    task = AgentTask(agent, "Say.", tmp_path / "0", "m", metadata={"a": 1})
    task.workdir.mkdir()
    for name in (INSTRUCTION_FILE, METADATA_FILE, RESULT_FILE, LOG_FILE):
        (task.workdir / name).symlink_to(outside / "file")
    os.mkfifo(task.workdir / REQUEST_KWARGS_FILE)
    for name in ("data", "folder", HOME):
        (task.workdir / name).symlink_to(outside)

    prepare_workdir(task)
    prepare_home({"a": "b"}, task, {})
    with AgentLog(task.workdir / LOG_FILE) as log:
        log.write(b"said")

    assert {path.name: path.read_text() for path in outside.iterdir()} == {"file": "kept"}
    assert (task.workdir / "data/deep/file").read_text() == (task.workdir / "folder/data").read_text() == "copied"
    assert json.loads((task.workdir / METADATA_FILE).read_text()) == {"a": 1}
    assert (task.workdir / LOG_FILE).read_text() == "said"


def test_a_folder_of_any_depth_is_removed(tmp_path: Path) -> None:
    """Python's own removal recurses, and an agent may nest more folders than it can."""
    deep = os.open(tmp_path, os.O_RDONLY)
    for _ in range(3_000):
        os.mkdir("d", dir_fd=deep)
        inner = os.open("d", os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = inner
    os.close(deep)

    make_way(tmp_path / "d")

    assert list(tmp_path.iterdir()) == []

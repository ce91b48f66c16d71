"""`harness config`, and commands that have their options from a file."""

import signal
from pathlib import Path

import pytest

from tests.harness_command import Ended, announced, harness, start_harness, wait
from tests.toy_model import write_toy_model

FLAG, VARIABLE, OF_FILE = "the-flags", "the-variables", "the-files"  # none is an address, and the error says so


@pytest.fixture(name="file")
def _file(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(
        f'[default]\nadmin_token = "s3cret"\n[ctl]\nserver = "{OF_FILE}"\n[router]\ngateway_args = "--api-key s3cret"'
    )
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    ("flags", "variables", "asked"),
    [
        (("--server", FLAG), {"HARNESS_SERVER": VARIABLE}, FLAG),
        ((), {"HARNESS_SERVER": VARIABLE}, VARIABLE),
        ((), {"HARNESS_SERVER": ""}, OF_FILE),
    ],
)
def test_flags_go_before_variables_and_these_before_the_file(
    flags: tuple[str, ...], variables: dict[str, str], asked: str, file: Path
):
    """The server that is asked is the one of the first that says something."""
    ended = harness("ctl", "status", *flags, env={"HARNESS_CONFIG": str(file), **variables})

    assert f"got {asked!r}" in ended.stderr


def test_where_each_value_comes_from_is_shown(file: Path):
    """And no token, wherever it stands."""
    env = {"HARNESS_CONFIG": str(file), "HARNESS_ENGINE_KEY": "s3cret", "HARNESS_SERVER": VARIABLE}
    ended, text = harness("config", "show", "--json", env=env), harness("config", "show", env=env)

    shown = {(each["command"], each["option"]): each for each in ended.document["settings"]}
    assert (
        shown["serve", "admin_token"] | {"value": "...", "source": "file", "key": "default.admin_token"}
        == (shown["serve", "admin_token"])
    )
    assert [shown["ctl status", "server"][key] for key in ("value", "source", "key")] == [
        *(VARIABLE, "environment", "HARNESS_SERVER")
    ]
    assert shown["router", "engine_key"]["key"] == "HARNESS_ENGINE_KEY"
    assert "s3cret" not in ended.stdout + text.stdout
    assert "admin_token" in text.stdout


def _with(text: str, path: Path, *command: str) -> Ended:
    path.write_text(text)
    return harness(*command, env={"HARNESS_CONFIG": str(path)})


def test_a_wrong_file_ends_a_command_with_one_line(tmp_path: Path):
    """Exit code 4; what helps to mend it runs on."""
    path = tmp_path / "config.toml"
    ended = _with("[serv]", path, "scenario", "list")

    assert (ended.code, ended.stdout, ended.stderr.count("\n")) == (4, "", 1)
    assert "did you mean 'serve'?" in ended.stderr
    assert _with("[serv]", path, "config", "show").code == 4
    assert _with("[serv]", path, "config", "path").stdout == f"{path}\n"
    assert _with("[serv]", path, "--help").code == 0


def test_a_server_is_started_by_its_file(tmp_path: Path):
    """Texts, numbers, switches and lists."""
    toy = write_toy_model(tmp_path / "toy")
    path = tmp_path / "config.toml"
    path.write_text(
        f'[serve]\nengine = "scripted"\ntokenizer = "{toy}"\nport = 0\nno_auth = true\nlimit = ["body_bytes=5000"]'
    )
    process = start_harness("serve", "--json", env={"HARNESS_CONFIG": str(path)})
    said = announced(process)
    process.send_signal(signal.SIGTERM)

    assert (wait(process).code, said["admin_token"]) == (0, None)

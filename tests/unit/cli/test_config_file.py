"""The file of one's own defaults: what it may say, and what a slip in it is answered with."""

import os
import re
import tomllib
from pathlib import Path

import pytest
import typer

from harness.cli.installation.config_file import config_path, find_danger, read_tables, settings_of
from harness.cli.main import app
from harness.errors import ConfigError
from harness.shards.supervisor import shard_environment
from tests.checkout import ROOT as CHECKOUT

ROOT = typer.main.get_command(app)
FILE = Path("config.toml")


def _say(text: str) -> dict[str, dict[str, object]]:
    """What the file says for each command, by parameter."""
    settings = settings_of(FILE, tomllib.loads(text), ROOT)
    return {
        " ".join(words): {name: each.value for name, each in values.items()}
        for words, values in settings.items()
        if values
    }


def test_the_narrowest_table_counts():
    """Of a command, of its group, of all."""
    said = _say('[default]\nserver = "a"\n[ctl]\nserver = "b"\n[ctl.pause]\nserver = "c"\nttl = 5')

    assert said["ctl pause"] == {"server": "c", "ttl": 5}
    assert (said["ctl drain"], said["sessions list"]) == ({"server": "b"}, {"server": "a"})


def test_what_holds_for_all_is_what_a_variable_could_say():
    """`--limit` of `run` has no variable, and means something else than that of `serve`."""
    assert _say('[default]\nlimit = ["body_bytes=1"]').keys() == {"serve", "router"}


def test_a_key_is_called_as_its_flag():
    """`--set` is the parameter `set_keys`, and `-n` has no other name than its parameter's."""
    assert _say('[run]\nset = ["seed=1"]\nconcurrency = 2') == {"run": {"set_keys": ["seed=1"], "concurrency": 2}}


def test_the_home_directory_is_known():
    """A shell would have known it."""
    assert _say('[serve]\nstore = "~/s.db"') == {"serve": {"store": str(Path.home() / "s.db")}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[serv]", "'serv': expected a command or `default`, got 'serv'; did you mean 'serve'?"),
        ("port = 5", "'port': expected a command or `default`"),
        ("serve = 5", "serve: expected a table, got an integer"),
        ("[ctl]\npause = 5", "ctl.pause: expected a table, got an integer"),
        ("[serve]\nprot = 5", "'serve.prot': expected an option of `harness serve`, got 'prot'; did you mean 'port'?"),
        ('[serve]\nadmin-token = "x"', "did you mean 'admin_token'?"),
        ("[ctl.pause]\ntlt = 5", "'ctl.pause.tlt': expected an option of `harness ctl pause`"),
        ("[default]\nttl = 5", "'default.ttl': expected an option that has a variable"),
        ("[run]\njson = true", "'run.json': expected an option of `harness run`"),
        ('[serve]\nport = "8000"', "serve.port: expected an integer, got a string"),
        ("[serve]\nport = true", "serve.port: expected an integer, got true or false"),
        ("[serve]\nport = 70000", "serve.port: "),
        ("[serve]\nno_auth = 1", "serve.no_auth: expected true or false, got an integer"),
        ("[serve]\nengine = 5", "serve.engine: "),
        ("[serve]\nengine = {kind = 'x'}", "serve.engine: "),
        ("[serve]\nlimit = 'body_bytes=1'", "serve.limit: expected an array, got a string"),
        ("[serve]\nlimit = [5]", "serve.limit: expected a string, got an integer"),
        ("[serve]\nstreaming = 'fast'", "serve.streaming: "),
        ("[serve]\nport = 2020-01-01", "serve.port: "),
    ],
)
def test_a_slip_is_one_line_with_file_and_key(text: str, words: str):
    """And with the near miss where there is one."""
    with pytest.raises(ConfigError) as error:
        _say(text)

    assert words in error.value.message
    assert error.value.message.startswith("config.toml: ")
    assert "\n" not in error.value.message


@pytest.mark.parametrize("text", ['admin_token = ["the secret"]', "admin_token = {secret = 'the secret'}"])
def test_no_value_is_quoted(text: str):
    """An error goes into logs."""
    with pytest.raises(ConfigError) as error:
        _say(f"[serve]\n{text}")

    assert "the secret" not in error.value.message


@pytest.mark.parametrize("content", [b"[serve", b'[serve]\nhost = "\xff"'])
def test_a_file_that_was_broken_off_is_told_of(content: bytes, tmp_path: Path):
    """Half a line, half a letter."""
    (tmp_path / "c.toml").write_bytes(content)

    with pytest.raises(ConfigError, match="expected TOML"):
        read_tables(tmp_path / "c.toml")


def test_a_file_is_needed_where_it_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By the variable; elsewhere nobody has to have one, and what cannot be read is told of."""
    monkeypatch.setenv("HARNESS_CONFIG", str(tmp_path / "none.toml"))
    with pytest.raises(ConfigError, match="HARNESS_CONFIG names it"):
        read_tables(config_path())

    monkeypatch.delenv("HARNESS_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert config_path() == tmp_path / "harness" / "config.toml"
    assert read_tables(config_path()) == {}
    with pytest.raises(ConfigError, match="cannot be read"):
        read_tables(tmp_path)


@pytest.mark.parametrize(
    ("mode", "text", "is_dangerous"),
    [
        (0o600, "[serve]\nadmin_token = 'x'", False),
        (0o644, "[serve]\nport = 1", False),
        (0o644, "[ctl.pause]\nadmin_token = 'x'", True),
        (0o640, "[default]\nengine_key = 'x'", True),
        (0o646, "[serve]\nport = 1", True),
    ],
)
def test_a_file_that_others_can_use_is_told_of(mode: int, text: str, is_dangerous: bool, tmp_path: Path):
    """A token is read; what anybody writes is run."""
    path = tmp_path / "c.toml"
    path.write_text(text)
    path.chmod(mode)

    assert (find_danger(path, read_tables(path)) is not None) == is_dangerous


def test_the_file_of_the_docs_is_right():
    """A reader begins with it."""
    page = (CHECKOUT / "docs" / "command-line.md").read_text()
    [text] = re.findall("^```toml\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)

    assert _say(text)["ctl pause"] == {"server": "http://127.0.0.1:8000", "ttl": 300}


def test_shards_do_not_read_the_file():
    """Their front has, and its `shards = 4` is not theirs."""
    assert shard_environment(None, "")["HARNESS_CONFIG"] == os.devnull

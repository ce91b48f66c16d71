"""What `harness serve --shards` is given, before a process is started."""

from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from harness.cli import options
from harness.cli.options import ServerOptions, takes_server_options
from harness.cli.servers.serve import serve_shards
from harness.errors import ScenarioError
from tests.harness_command import harness

TEXTS = st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), min_size=1)


@given(
    tokenizer=st.none() | TEXTS.map(lambda name: Path("/models") / name.replace("/", "")),
    template=st.none() | TEXTS,
    open_paths=st.booleans(),
    matching=st.none() | st.lists(TEXTS, min_size=1, max_size=3),
    pause_timeout=st.floats(0, 1e6),
    port=st.integers(0, 65535),
)
def test_options_come_through_a_command_line_as_they_were(**given_options: object):
    """Whatever they hold: a shard has those of its front."""
    heard: list[ServerOptions] = []
    app = typer.Typer()

    @app.command()
    @takes_server_options
    def listen(*, server: ServerOptions) -> None:
        heard.append(server)

    said = ServerOptions(**given_options)  # type: ignore[arg-type]  # drawn by name
    app(said.as_arguments(), standalone_mode=False)

    assert heard == [said]


def test_secrets_are_on_no_command_line():
    """Everybody on the machine reads those."""
    arguments = ServerOptions(admin_token="secret", engine_key="secret").as_arguments()
    assert not any("secret" in argument for argument in arguments)


@pytest.mark.parametrize(
    ("store", "engine", "words"),
    [
        ("shards", "local", "harness engine up local"),
        ("shards", "sglang", "harness engine up"),
        ("memory", "scripted", "--store DIR"),
        ("file.db", "scripted", "--store DIR"),
        ("shards", "nothing=http://a", "no engine"),
    ],
)
def test_what_shards_cannot_share_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str, engine: str, words: str
):
    """Before a directory is made."""
    monkeypatch.chdir(tmp_path)
    Path("file.db").write_text("")
    with pytest.raises(ScenarioError, match=words):
        serve_shards(options.ServerOptions(store=store), 2, engine, [], continue_engines=False, as_json=True)
    assert not Path("shards").exists()


@pytest.mark.xdist_group("command")
@pytest.mark.parametrize("number", ["0", "257", "-1", "two"])
def test_a_number_that_is_none_is_refused(number: str):
    """As every option that is wrong."""
    assert harness("serve", f"--shards={number}", "--engine=scripted").code == 4

"""The unit of docs/keep-running.md starts a server with options that it has, and gives it the time to end by itself."""

import shlex
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest
from typer.main import get_command

from harness.cli.main import app
from harness.server.settings import ServerSettings
from harness.suite.exits import ExitCode
from tests.shown_blocks import shown_blocks

[UNIT] = [block.text for block in shown_blocks("ini") if block.page == "keep-running.md"]
HAND_OVER_S = 3


@pytest.fixture(name="service")
def _service() -> dict[str, str]:
    unit = ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[method-assign, assignment]
    unit.read_string(UNIT)
    return dict(unit["Service"])


def test_the_command_line_is_one_of_harness_serve(service: dict[str, str]) -> None:
    """And its store stands in a folder that systemd makes for it."""
    program, command, *options = shlex.split(service["ExecStart"])
    known = {flag for option in get_command(app).commands["serve"].params for flag in option.opts}  # type: ignore[attr-defined]

    assert (Path(program).name, command) == ("harness", "serve")
    assert {word for word in options if word.startswith("--")} <= known
    assert options[options.index("--store") + 1].startswith(f"/var/lib/{service['StateDirectory']}/")
    assert service["Environment"] == f"HARNESS_CACHE=/var/cache/{service['CacheDirectory']}"


def test_a_server_ends_by_itself_before_it_is_killed(service: dict[str, str]) -> None:
    """And one whose command line is wrong is not started again and again."""
    assert float(service["TimeoutStopSec"]) > ServerSettings().stop_grace_s + HAND_OVER_S
    assert int(service["RestartPreventExitStatus"]) == ExitCode.USAGE


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here to ask")
def test_systemd_knows_every_key(tmp_path: Path) -> None:
    """`systemd-analyze verify` says nothing of the unit, with a program that is there."""
    file = tmp_path / "session-server.service"
    program = tmp_path / "harness"
    program.symlink_to(Path(sys.executable).with_name("harness"))  # whose path may have a space in it
    file.write_text(UNIT.replace("/opt/harness/bin/harness", str(program)))
    said = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", file], check=False, capture_output=True, text=True, timeout=60
    )
    assert [line for line in (said.stdout + said.stderr).splitlines() if file.name in line] == []

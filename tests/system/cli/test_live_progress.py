"""`harness run` while an engine is slow: rows on a terminal, lines in a pipe."""

import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.harness_command import harness, write_scenario

SLOW = {"steps": [{"text": "One and two and three.", "delay_s": 4.0}]}


@pytest.fixture(name="scenario")
def _scenario(tmp_path: Path) -> Path:
    """Two sessions of one turn, for which the engine takes four seconds."""
    return write_scenario(tmp_path / "slow", script=SLOW, prompts=[{"metadata": {"turns": 1}}])


def test_a_pipe_hears_of_a_slow_engine(scenario: Path, tmp_path: Path):
    """Lines between the beginning and the first end, and standard output stays the document's."""
    ended = harness("run", scenario, "--out", tmp_path / "run", "--json")
    told = [line for line in ended.stderr.splitlines() if line.startswith("0 of 2 ended, 2 running")]

    assert ended.code == 0, ended.stderr
    assert len(told) >= 2
    assert any("(2 engine)" in line for line in told)
    assert "\x1b" not in ended.stderr


def test_a_terminal_has_a_row_for_each_session(scenario: Path, tmp_path: Path):
    """With its state; and nothing of it is left in the end."""
    screen, end = pty.openpty()
    command = [sys.executable, "-m", "harness", "run", str(scenario), "--out", str(tmp_path / "run")]
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "30"}
    with subprocess.Popen(command, stderr=end, stdout=subprocess.DEVNULL, env=env, start_new_session=True) as process:
        os.close(end)
        seen = b""
        with suppress(OSError):  # how the other end says that it is closed
            while data := os.read(screen, 65_536):
                seen += data
    os.close(screen)
    text = seen.decode()

    assert process.returncode == 0
    assert "0 of 2 ended, 2 running" in text
    assert [name for name in ("slow/0", "slow/1") if name in text.partition("finished")[0]] == ["slow/0", "slow/1"]
    assert "engine" in text
    assert "tokens/s" in text

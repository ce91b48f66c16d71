"""`bench/turn_overhead.py` as a user calls it: its table, its bars, its pictures, and what it says when it cannot."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bench.tool_loop.bars import STREAMED, Figures, judge
from tests.checkout import ROOT


def bench(*options: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """What the script says."""
    command = [sys.executable, "-W", "error", "bench/turn_overhead.py", *options]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False, env=environment or None
    )


def test_servers_are_compared_by_their_commands(tmp_path: Path) -> None:
    """Ours whole and streamed, the proxy, and one that only its command names; a picture of each figure."""
    folder = shlex.quote(str(tmp_path))
    command = f"{shlex.quote(sys.executable)} -m bench.tool_loop.servers proxy --port {{port}} --engine {{engine_url}}"
    command += f" --tokenizer {{tokenizer}} --directory {folder}"
    options = ("--json", "--shapes", "2x6", "--servers", "sqlite,streamed", "--plots", str(tmp_path / "plots"))
    said = bench(*options, "--compare", f"another={command}")

    assert said.returncode == 0, said.stderr
    runs = {run["server"]: run for run in json.loads(said.stdout)["runs"]}
    assert list(runs) == ["proxy", "sqlite", "streamed", "another"]
    assert {len(run["latency_ms_by_turn"]) for run in runs.values()} == {6}
    pictures = [tmp_path / "plots" / f"{name}_2x6.png" for name in ("latency", "cpu")]
    assert [picture.read_bytes()[:4] for picture in pictures] == [b"\x89PNG"] * 2


def test_a_server_that_does_not_start_is_named() -> None:
    said = bench("--shapes", "1x6", "--servers", "sqlite", "--compare", "broken=ls /nothing/{port}")

    assert said.returncode == 1
    assert "ls /nothing/{port}: it ended with 2" in said.stderr


@pytest.mark.parametrize("named", ["no command", "proxy=true", "=true"])
def test_a_name_of_nothing_is_refused(named: str) -> None:
    said = bench("--compare", named)

    assert (said.returncode, said.stdout) == (1, "")
    assert "--compare: expected NAME=COMMAND" in said.stderr


def test_pictures_need_a_library_that_is_named(tmp_path: Path) -> None:
    """Before anything is measured, where it is not installed."""
    (tmp_path / "matplotlib.py").write_text("raise ImportError('not here')")
    said = bench("--plots", str(tmp_path / "plots"), PYTHONPATH=str(tmp_path))

    assert (said.returncode, said.stdout) == (1, "")
    assert "pip install 'session-harness[plots]'" in said.stderr


def figures(server: str, sessions: int, **others: float) -> Figures:
    """Of a run in which everything took one millisecond, but for `others`."""
    took = dict.fromkeys(Figures.__dataclass_fields__, 1.0) | {"server": server, "sessions": sessions, "turns": 50}
    return Figures(**{**took, "latency_ms_by_turn": (), "cpu_ms_by_tenth": (), **others})


def test_each_bar_says_whether_it_holds() -> None:
    """Of the shapes and servers that were measured; the proxy's own growth is no fault of the server."""
    report = [
        figures("proxy", 32, cpu_ms_per_turn=0.08),
        figures("sqlite", 32),
        figures("proxy", 1, late_ms=2.0),
        figures("sqlite", 1, late_ms=2.1),
        figures(STREAMED, 1, cpu_ms_per_turn=1.4),
    ]
    assert [(round(bar.found, 2), bar.holds) for bar in judge(report)] == [
        (12.5, False),
        (1.0, True),
        (1.1, True),
        (1.4, False),
    ]
    assert "times the proxy's: 12.50 (wanted: <= 10): MISSED" in "\n".join(map(str, judge(report)))
    assert list(judge(report[:1])) == []

"""Abort after abort with live sessions of every kind; `make soak` does a thousand of them with 64."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from soak.cycle_figures import Figures
from tests.checkout import ROOT

SOAK = ROOT / "soak" / "abort_cycles.py"


def abort_over_and_over(*arguments: str) -> dict[str, Any]:
    """The figures of a run of the soak, with nothing wrong."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(SOAK), *arguments, "--json"],
        check=False,
        capture_output=True,
        text=True,
        timeout=390,
    )
    assert done.stdout, done.stderr
    figures: dict[str, Any] = json.loads(done.stdout)
    assert (done.returncode, figures["wrong"]) == (0, []), done.stderr
    return figures


@pytest.mark.timeout(400)
def test_cycles_of_drain_abort_collect_and_resume_leave_nothing_behind():
    """No sample with a token after an incomplete turn, a ledger that balances, an open gate; nothing is left."""
    figures = abort_over_and_over("--cycles", "5", "--sessions", "16")  # one thing left behind by any would show

    assert (figures["cycles"], figures["rollouts"]) == (5, 5 * 16)
    assert figures["before"] == figures["after"]
    assert figures["turns"]["aborted"] > 0
    assert figures["samples"] > 0


@pytest.mark.timeout(400)
def test_cycles_of_tool_loops_are_cut_where_a_turn_was_incomplete(tmp_path):
    """Every session has six turns and more before the abort, and another reader of the file counts what we count."""
    keep = tmp_path / "figures.json"
    figures = abort_over_and_over("--turns", "6", "--sessions", "8", "--cycles", "1", "--keep", str(keep))

    assert (figures["cycles"], figures["rollouts"]) == (1, 8)
    assert json.loads(keep.read_text())["figures"]["cycles"] == 1
    assert sum(figures["turns"].values()) >= 8 * 6
    assert figures["turns"]["aborted"] > 0
    assert figures["cut_inside"]["turns"] > figures["cut_inside"]["sessions"] > 0
    assert figures["tokens"]["after_incomplete"] > 0
    assert (figures["tokens"]["trained"], figures["tokens"]["masked"] > 0) == (0, True)


def test_kept_figures_are_those_of_one_run(tmp_path: Path):
    """They come back as they were; cycles of another kind are not added to them."""
    path = tmp_path / "figures.json"
    figures = Figures(cycles=2, turns=Counter(aborted=3), abort_s=[0.5, 1.5], wrong=["cycle 1: a token"])
    figures.save(path, {"turns": 6})

    assert Figures.load(path, {"turns": 6}) == figures
    assert Figures.load(tmp_path / "none.json", {"turns": 6}) == Figures()
    with pytest.raises(SystemExit, match="name another file"):
        Figures.load(path, {"turns": 7})

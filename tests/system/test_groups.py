"""Tests of one xdist group run on one worker: the real engines are started once, and one at a time computes."""

import subprocess
import sys
from pathlib import Path

GROUPED = """
import pytest

@pytest.mark.xdist_group("together")
@pytest.mark.parametrize("number", range(12))
def test_one_of_a_group(number, worker_id):
    with open("workers", "a") as workers:
        print(worker_id, file=workers)
"""


def test_a_group_has_one_worker(tmp_path: Path) -> None:
    """A pair of pytest and pytest-xdist that ignores groups says nothing of it."""
    (tmp_path / "test_grouped.py").write_text(GROUPED)

    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=100)

    workers = (tmp_path / "workers").read_text().split()
    assert len(workers) == 12
    assert len(set(workers)) == 1

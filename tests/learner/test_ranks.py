"""Two processes that share the packs of a step train as one process does, and meet once per step."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.checkout import ROOT
from tests.learner.rank_program import BUCKET_BYTES, DEADLINE_S, RANKS, train

SHARES = (([0, 1, 2], [3, 4, 5]), ([0, 1, 2, 3, 4], [5]), ([0, 1, 2, 3, 4, 5], []))
"""The packs of each of two ranks, of six in all."""


def run_ranks(folder: Path) -> list[int]:
    """The exit codes of `rank_program`, run in a process for each rank."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.learner.rank_program"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), json.dumps([each[rank] for each in SHARES])], cwd=folder, env=environment
        )
        for rank in range(RANKS)
    ]
    try:
        return [each.wait(timeout=2 * DEADLINE_S) for each in ranks]
    finally:
        for each in ranks:
            each.kill()
            each.wait()


def test_two_ranks_train_as_one_process_until_one_is_lost(tmp_path: Path) -> None:
    """Also with different numbers of packs, or none: weights, figures and norms; one all-reduce per bucket and step.

    A rank that is lost ends the step of the other at once, not after the timeout of the group, and nothing is trained.
    One test, because two processes that load torch are what it costs.
    """
    (tmp_path / "alone").mkdir()
    alone = train(0, list(range(6)), tmp_path / "alone")
    buckets, size = 1, 0
    for each in alone["parameter_bytes"].tolist():
        buckets, size = (buckets + 1, each) if size and size + each > BUCKET_BYTES else (buckets, size + each)
    assert buckets > 2
    assert alone["reductions"] == 0
    assert run_ranks(tmp_path) == [0, -9]
    for run, rank in itertools.product(range(len(SHARES)), range(RANKS)):
        found = np.load(tmp_path / f"{run}-{rank}.npz")
        np.testing.assert_allclose(found["weights"], alone["weights"], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(found["figures"], alone["figures"], rtol=1e-9, atol=1e-12)
        assert found["reductions"] == 2 * buckets
    step, is_same, told = (tmp_path / "told.txt").read_text().split(" ", 2)
    assert (step, is_same) == ("0", "True")
    assert "another rank" in told

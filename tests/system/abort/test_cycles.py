"""Abort after abort with live sessions of every kind; `make soak` does a thousand of them with 64."""

import json
import subprocess
import sys

import pytest

from tests.checkout import ROOT

SOAK = ROOT / "soak" / "abort_cycles.py"


@pytest.mark.timeout(400)
def test_cycles_of_drain_abort_collect_and_resume_leave_nothing_behind():
    """No sample with a token after an incomplete turn, a ledger that balances, an open gate; nothing is left."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(SOAK), "--cycles", "25", "--sessions", "16", "--json"],
        check=False,
        capture_output=True,
        text=True,
        timeout=390,
    )
    assert done.stdout, done.stderr
    figures = json.loads(done.stdout)

    assert (done.returncode, figures["wrong"]) == (0, []), done.stderr
    assert (figures["cycles"], figures["rollouts"]) == (25, 25 * 16)
    assert figures["before"] == figures["after"]
    assert figures["turns"]["aborted"] > 0
    assert figures["samples"] > 0

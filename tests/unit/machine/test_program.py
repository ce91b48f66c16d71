"""Programs run to their end, on the event loop of commands."""

import os

import uvloop

from harness.machine.program import Ended, run


def test_a_daemon_that_a_program_starts_does_not_hold_its_end_up(tmp_path):
    """A container engine leaves one behind, which inherits open descriptors. Variables need not be a dict."""
    pid = tmp_path / "pid"
    script = f"setsid sleep 60 >/dev/null 2>&1 & echo $! >{pid}; echo out; echo err >&2; exit 3"
    try:
        assert uvloop.run(run("sh", "-c", script, deadline_s=20, env=os.environ)) == Ended(3, "out\n", "err\n")
    finally:
        os.kill(int(pid.read_text()), 9)

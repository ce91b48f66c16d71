"""`harness agent doctor` ends well."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.rollouts.agents.install import search_path
from harness.rollouts.agents.programs import bundled_profile

_HANGS = """#!/bin/sh
echo started > "{started}"
exec sleep 600
"""


def test_a_termination_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """While the agent that it has started hangs in the home that was made for it."""
    cache, temporary, started = tmp_path / "cache", tmp_path / "temporary", tmp_path / "started"
    temporary.mkdir()
    os.mkfifo(started)
    monkeypatch.setenv("HARNESS_CACHE", str(cache))
    (programs,) = search_path(bundled_profile("openai_agents"))
    programs.mkdir(parents=True)
    (programs / "python").write_text(_HANGS.format(started=started))
    (programs / "python").chmod(0o755)

    command = [sys.executable, "-m", "harness", "agent", "doctor", "openai_agents"]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert started.read_text() == "started\n"
        assert [folder.name.startswith("harness-doctor-") for folder in temporary.iterdir()] == [True]
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)

    assert process.returncode != 0
    assert list(temporary.iterdir()) == []

"""`bench/dialects.py` as it is called, on a small scale."""

import json
import subprocess
import sys

from tests.checkout import ROOT
from tests.dialects.speakers import SPEAKERS


def test_each_dialect_is_compared_with_chat_completions() -> None:
    """Whole and streamed, each of them on one branch; how much it is, a busy machine must not decide."""
    command = [sys.executable, "-W", "error", "bench/dialects.py", "--json"]
    options = ("--history", "2", "--turns", "1", "--rounds", "1")
    said = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)

    assert said.returncode == 0, said.stderr
    found = json.loads(said.stdout)
    for way in ("whole", "streamed"):
        assert found[f"openai_chat_{way}_times_chat"] == 1
        assert all(found[f"{speaker}_{way}_ms"] > 0 for speaker in SPEAKERS)

"""`bench/real_overhead.py` before a real SGLang: both ways say the same words, and the harness is one of them."""

import json
import subprocess
import sys

from tests.checkout import ROOT


def test_the_same_words_are_said_straight_and_through_the_harness(sglang_url: str) -> None:
    """Every turn of every session has all its tokens, or the script says which one has not."""
    command = [sys.executable, "-W", "error", "bench/real_overhead.py", "--json", "--engine", sglang_url]
    options = ("--sessions", "2", "--turns", "2", "--tokens", "8", "--pairs", "1")
    said = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)

    assert said.returncode == 0, said.stderr
    found = json.loads(said.stdout)
    assert [(run["way"], run["sessions"]) for run in found["runs"]] == [("harness", 2), ("direct", 2)]
    assert [bar["bound"] for bar in found["bars"]] == [0.98]

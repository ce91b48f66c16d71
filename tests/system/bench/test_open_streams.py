"""`bench/open_streams.py` and `soak/steady_load.py` as they are called, on a small scale."""

import json
import subprocess
import sys

from soak.steady_load import Vitals, judge
from tests.checkout import ROOT


def test_streams_are_held_and_then_served() -> None:
    """All of them wait at the gate, and all of them are read to their end."""
    command = [sys.executable, "-W", "error", "bench/open_streams.py", "--json"]
    options = ("--streams", "20", "--held", "0.5", "--tokens", "4")
    said = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)

    assert said.returncode == 0, said.stderr
    found = json.loads(said.stdout)
    assert (found["held"], found["errors"], found["holds"]) == (20, 0, True)


def vitals(minute: float, rss_mib: float = 100.0, store_mib: float = 5.0, tasks: int = 30) -> Vitals:
    """What a server holds then."""
    return Vitals(minute * 60, rss_mib, store_mib, descriptors=40, threads=6, tasks=tasks)


def test_what_grows_is_told_from_what_does_not() -> None:
    """Memory by its slope once it has settled; the rest by what it had come to by the middle."""
    steady = judge([vitals(minute, rss_mib=100 + 50 * (minute < 5) + 0.2 * minute) for minute in range(20)])
    leaking = judge([vitals(minute, 100 + minute, 5 + minute, 30 + minute) for minute in range(20)])

    assert all(value <= bound for value, bound in steady.values())
    assert {name for name, (value, bound) in leaking.items() if value > bound} == {
        "memory, MiB a minute",
        "store_mib",
        "tasks",
    }

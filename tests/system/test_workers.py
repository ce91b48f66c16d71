"""A test that kills its worker, or swallows its time limit, costs itself alone."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = """
import os, pytest

@pytest.mark.xdist_group("together")
@pytest.mark.parametrize("number", range(3))
def test_dies(number):
    if number == 1:
        os._exit(1)

def test_dies_alone():
    os._exit(1)

def test_lives():
    pass
"""
SWALLOWS = """
import time, pytest

def test_swallows():
    try:
        time.sleep(60)
    except BaseException:
        time.sleep(60)
"""


@pytest.mark.parametrize(
    ("program", "options", "ended"),
    [
        (KILLS, ("-n", "2", "--dist", "loadgroup"), {"failed": 2, "passed": 3}),
        (KILLS, ("-n", "1", "--dist", "loadgroup"), {"failed": 2, "passed": 3}),
        (SWALLOWS, ("--timeout", "0.5"), {"failed": 1}),
    ],
    ids=("two workers", "one worker", "time limit"),
)
def test_what_a_test_does_to_its_process_costs_itself_alone(
    tmp_path: Path, program: str, options: tuple[str, ...], ended: dict[str, int]
) -> None:
    """Every other test is run, once."""
    (tmp_path / "test_it.py").write_text(program)
    plugins = (part for name in ("xdist", "pytest_timeout", "tests.workers") for part in ("-p", name))
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "-p", "no:cacheprovider", "--rootdir", ".", *options, "test_it.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    counts = re.findall(r"(\d+) (passed|failed|error)", result.stdout.splitlines()[-1])
    assert {what: int(count) for count, what in counts} == ended, result.stdout + result.stderr

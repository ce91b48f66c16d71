"""The prose of the code, and its amount, have budgets that may only fall."""

import re
import subprocess
import sys

from tests.checkout import ROOT
from tests.prose import SOURCES, measure

BUDGETS = {
    "docstring words per 1,000 lines": 1816,
    "docstrings that begin with What, Of, How ...": 769,
    "functions that do not begin with a verb": 1393,
    "banned words": 490,
    "class names used twice": 33,
    "lines": 67_400,
}
D401 = 1260
"""First lines that ruff does not take for imperative."""


def test_no_figure_is_above_its_budget() -> None:
    """Who writes more or worse than before rewrites something; who writes less lowers the budget."""
    found = measure().figures()
    assert {name: figure for name, figure in found.items() if figure > BUDGETS[name]} == {}
    assert found.keys() == BUDGETS.keys()


def test_no_more_first_lines_than_before_are_not_imperative() -> None:
    """Counted by ruff, whose rule is off for the rest of the checks."""
    command = [sys.executable, "-m", "ruff", "check", "--select", "D401", "--output-format", "concise", *SOURCES]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    assert len(re.findall(r" D401 ", said)) <= D401

"""The prose of the code, and its amount, have budgets that may only fall."""

from tests.prose import measure

BUDGETS = {
    "docstring words per 1,000 lines": 1000,
    "docstrings that begin with What, Of, How ...": 0,
    "functions that do not begin with a verb": 0,
    "banned words": 0,
    "class names used twice": 2,
    "lines": 71_410,
}


def test_no_figure_is_above_its_budget() -> None:
    """Who writes more or worse than before rewrites something; who writes less lowers the budget."""
    found = measure().figures()
    assert {name: figure for name, figure in found.items() if figure > BUDGETS[name]} == {}
    assert found.keys() == BUDGETS.keys()

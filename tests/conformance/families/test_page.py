"""docs/model-families.md says what is measured."""

import pytest

from tests.conformance.families.family import NAMES
from tests.conformance.families.page import PAGE, rows_of


@pytest.mark.timeout(300)
def test_the_page_has_the_lines_of_every_family(family):
    """Run `python -m tests.conformance.families.page` when this fails."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()

    assert [row for row in rows_of(family.name) if row not in lines] == []


def test_the_page_has_no_other_family():
    """Five lines for each that is tested."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    named = [line for line in lines if any(line.startswith((f"| {name} |", f"- **{name}**")) for name in NAMES)]

    assert len(named) == 5 * len(NAMES)

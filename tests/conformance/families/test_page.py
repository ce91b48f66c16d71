"""docs/model-families.md says what is measured."""

import re

import pytest

from tests.conformance.families.family import NAMES
from tests.conformance.families.page import COUNTS, PAGE, SERVED, line_of
from tests.conformance.families.retokenizing import measure

TEXT = PAGE.read_text(encoding="utf-8")


@pytest.mark.timeout(300)
def test_the_page_has_the_line_of_every_family(family):
    """Run `python -m tests.conformance.families.page` when this fails."""
    found = re.findall(r"^- (.+): (\d+) to (\d+)$", TEXT, re.MULTILINE)
    ranges = {kind: range(int(low), int(high) + 1) for kind, low, high in found}

    assert line_of(family.name) in TEXT.splitlines()
    assert [kind for kind, share in measure(family).items() if share not in ranges[kind]] == []


def test_the_page_has_no_other_family():
    """A line for each that is tested."""
    section = TEXT.partition("## Families")[2].partition("\n## ")[0]

    assert re.findall(r"^- \*\*([\w-]+)\*\*: ", section, re.MULTILINE) == [*NAMES]


def test_the_counts_in_sentences_are_those_of_the_tests():
    """Each family has as many conversations as the page says of all."""
    assert [re.findall(pattern, TEXT) for pattern, _ in COUNTS] == [[counted] for _, counted in COUNTS]
    assert {*SERVED} == {min(SERVED)}
    assert len(SERVED) == len(NAMES)

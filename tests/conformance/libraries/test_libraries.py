"""Client libraries and sessions by their defaults: one conversation is one branch, on models that think or not."""

import os

import pytest

from tests.conformance.agents.table import PAGE
from tests.conformance.clients.table import table_in
from tests.conformance.libraries.casts import ANSWERS, LIBRARIES, Library
from tests.conformance.libraries.scene import Findings
from tests.conformance.libraries.table import BEGIN, END, is_one_branch, play_offline, rows_of, table_of

pytestmark = [pytest.mark.agent, pytest.mark.timeout(900), pytest.mark.xdist_group("libraries")]

PLAYED = [library for library in LIBRARIES if "HARNESS_SOAK_LIBRARIES" in os.environ or not library.is_rare]
each_library = pytest.mark.parametrize("library", PLAYED, ids=lambda library: library.name)


@pytest.fixture(scope="module", name="findings")
def _findings() -> Findings:
    """Every conversation, played once."""
    return play_offline(PLAYED)


@each_library
def test_every_conversation_comes_to_its_end(findings: Findings, library: Library) -> None:
    """Both questions are answered, streams are streams, and the ledger has every token."""
    for name, played in findings[library.name].items():
        ends = [answer.strip().endswith(last) for answer, last in zip(played.answers, ANSWERS, strict=True)]
        assert ends == [True, True], (name, played.answers)
        assert (played.turns, played.unaccounted) == (6, 0), name
        assert (played.streamed > 0) is ("streamed" in name), name


@each_library
def test_one_conversation_is_one_branch(findings: Findings, library: Library) -> None:
    """Prompt and output of every turn begin the next prompt, and one sample trains all of it.

    A library that rewrites its history says so in the table.
    """
    is_one = {name: is_one_branch(played) for name, played in findings[library.name].items()}

    assert is_one == {name: library.keeps_history(streams="streamed" in name) for name in is_one}


def test_the_page_says_what_libraries_do(findings: Findings) -> None:
    """Run `python -m tests.conformance.libraries.table` when this fails."""
    lines = table_in(PAGE.read_text(encoding="utf-8"), BEGIN, END)

    assert rows_of(PLAYED, lines) == rows_of(PLAYED, table_of(findings))
    assert [library.name for library in LIBRARIES if not rows_of([library], lines)] == []

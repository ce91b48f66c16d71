"""Unmodified agents, each from its own environment and without a network, against a model that says what it is told."""

import pytest

from harness.rollouts.agents.profile import PROFILE_FILE
from harness.rollouts.agents.programs import bundled_agent, bundled_agents, bundled_profile
from tests.conformance.agents.offline import play_offline
from tests.conformance.agents.parts import AGENTS, SYSTEM_AMONG_MESSAGES, turns_of
from tests.conformance.agents.scenes import Findings
from tests.conformance.agents.stage import Played
from tests.conformance.agents.table import BEGIN, END, PAGE, further_requests, table_of
from tests.conformance.clients.table import table_in, without_seconds

pytestmark = [pytest.mark.agent, pytest.mark.timeout(900), pytest.mark.xdist_group("agents")]

MOST_FURTHER_REQUESTS = 2
"""Codex counts a 404 among what may be tried again, as often as its profile allows; Claude Code tries once more."""


@pytest.fixture(scope="module", name="findings")
def _findings() -> Findings:
    """Every scene, played once."""
    return play_offline()


def test_every_profile_is_played() -> None:
    """An agent that is added has a part here."""
    assert [name for name in bundled_agents() if bundled_agent(name).name == PROFILE_FILE] == AGENTS


def is_kept(name: str, played: Played) -> bool:
    """Whether one exact sample has what the engine heard and said; one of each turn where the history is rewritten."""
    if bundled_profile(name).spec.client.rewrites_history:
        return played.is_sample_a_turn
    return played.is_exact and played.is_one_sample


@pytest.mark.parametrize("name", AGENTS)
def test_a_program_of_the_model_finds_no_session_in_its_environment(findings: Findings, name: str) -> None:
    """The agent has key and address from its files, or takes them out of the environment of its tool."""
    assert findings.paused[name].hides_session


@pytest.mark.parametrize("name", AGENTS)
@pytest.mark.parametrize("scene", ["drained_between_turns", "drained_in_flight"])
def test_a_drain_stops_every_agent(findings: Findings, scene: str, name: str) -> None:
    """It asks no more, or a few times, and what was sampled is one sample."""
    played: dict[str, Played] = getattr(findings, scene)
    one = played[name]

    assert one.outcome == "drained", one
    assert further_requests(one) <= MOST_FURTHER_REQUESTS
    assert (is_kept(name, one), one.unaccounted) == (True, 0)


@pytest.mark.parametrize("name", AGENTS)
def test_no_agent_notices_a_long_pause(findings: Findings, name: str) -> None:
    """The turn that was cut continues; all turns are one sample of what the engine heard and said, side calls apart.

    Those that can be told so would give up, or ask again, after 5 s without an event.
    """
    played = findings.paused[name]

    # opencode ends without its title, if that takes longer than its task.
    assert played.refusals in ({}, {"client_left": 1} if name == "opencode" else {})
    assert played.is_told
    assert (played.outcome, played.notes) == ("finished", "one\ntwo\n"), (played.detail, played.log)
    assert (played.main_turns, is_kept(name, played)) == (turns_of(name), True), played
    assert played.unaccounted == 0
    assert (played.streamed > 0) is bundled_profile(name).spec.client.streams


@pytest.mark.parametrize("name", AGENTS)
def test_every_agent_comes_again_when_it_is_asked_to(findings: Findings, name: str) -> None:
    """503 with Retry-After is waited for; thoughts before every call, which agents drop or rename, break no sample."""
    played = findings.refused_for_a_while[name]

    assert (played.outcome, played.notes) == ("finished", "one\ntwo\n"), (played.detail, played.log)
    assert played.refusals.keys() == {"gate_closed"}
    assert (played.main_turns, is_kept(name, played)) == (turns_of(name), True), played
    assert played.unaccounted == 0


@pytest.mark.parametrize("name", SYSTEM_AMONG_MESSAGES)
def test_late_system_messages_keep_one_branch_on_a_family_that_refuses_them(findings: Findings, name: str) -> None:
    """Twenty tool turns are one sample."""
    played = findings.strictly[name]

    assert (played.outcome, played.main_turns) == ("finished", 21), (played.detail, played.log)
    assert (played.is_exact, played.is_one_sample, played.unaccounted) == (True, True, 0)


def test_the_page_says_what_agents_do(findings: Findings) -> None:
    """Run `python -m tests.conformance.agents.table` when this fails."""
    assert without_seconds(table_in(PAGE.read_text(encoding="utf-8"), BEGIN, END)) == without_seconds(
        table_of(findings)
    )

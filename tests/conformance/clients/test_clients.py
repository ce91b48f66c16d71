"""Real client libraries in a drain, in a pause, and when they are asked to come again later."""

import asyncio
import re

import pytest

from harness.rollouts.client.session_server import SessionServerClient
from tests.checkout import ROOT
from tests.conformance.clients.players import ANSWERS, LIBRARIES, SCRIPT
from tests.conformance.clients.scenes import Findings, Played, play_all, scene

pytestmark = [pytest.mark.agent, pytest.mark.timeout(400), pytest.mark.xdist_group("clients")]

PROMISED_S = 10
ASKED_BEFORE = 1
"""Turns that every client has had when something happens in the second one."""


@pytest.fixture(scope="module", name="findings")
def _findings() -> Findings:
    """Every scene, played once."""
    return asyncio.run(play_all())


def further_requests(played: Played) -> int:
    """Return how often a client asked after the request that told it to stop."""
    return played.requests - ASKED_BEFORE - 1


@pytest.mark.parametrize("scene_name", ["drained_between_turns", "drained_in_flight"])
def test_a_drain_stops_every_client(findings, scene_name):
    """The request that is answered 404 is the last one, and the process ends soon."""
    outcome = getattr(findings, scene_name)

    assert {library: further_requests(played) for library, played in outcome.items()} == dict.fromkeys(outcome, 0)
    assert {library: played.ending.exit_code for library, played in outcome.items()} == dict.fromkeys(outcome, 1)
    assert [library for library, played in outcome.items() if played.seconds > PROMISED_S] == []


def test_no_client_notices_a_long_pause(findings):
    """Everything is asked once and answered, and the session is one sample of all turns."""
    outcome = findings.paused

    assert {library: (played.ending.answers, played.requests) for library, played in outcome.items()} == dict.fromkeys(
        outcome, (ANSWERS, len(SCRIPT))
    )
    assert [library for library, played in outcome.items() if played.sample_turns != [[0, 1, 2, 3]]] == []


def test_clients_that_are_meant_to_stream_do(findings):
    """Every answer of theirs, and none of the others."""
    assert {library: played.streamed for library, played in findings.paused.items()} == {
        library: len(SCRIPT) if library.streams else 0 for library in findings.paused
    }


def test_every_client_comes_again_when_it_is_asked_to(findings):
    """One more request for each 503 with Retry-After, and the conversation continues as one sample."""
    outcome = findings.refused_for_a_while

    assert {library: played.ending.answers for library, played in outcome.items()} == dict.fromkeys(outcome, ANSWERS)
    assert [library for library, played in outcome.items() if played.sample_turns != [[*range(len(SCRIPT))]]] == []
    assert {library: played.refusals.keys() for library, played in outcome.items()} == {
        library: {"gate_closed"} for library in outcome
    }
    assert {library: played.requests for library, played in outcome.items()} == {
        library: len(SCRIPT) + played.refusals["gate_closed"] for library, played in outcome.items()
    }


def test_the_page_names_every_client():
    """docs/abort.md has the versions that are played here."""
    section = (ROOT / "docs/abort.md").read_text(encoding="utf-8").partition("## What clients do")[2]

    assert {(library.package, library.version) for library in LIBRARIES} == {
        *re.findall(r"([a-z-]+) (\d[\d.]*\d)[,)]", section.partition("\n\n")[2].partition("\n\n")[0])
    }


async def test_an_owner_that_creates_a_session_while_draining_gets_it_after_resume():
    """503 with Retry-After is waited for."""
    async with scene({}) as stage:
        await stage.turn_gate("drain")
        client = SessionServerClient(str(stage.server.base_url))
        creation = asyncio.create_task(client.create({}))
        while "gate_closed" not in (await stage.server.get("/metrics")).text:
            await asyncio.sleep(0.02)
        await stage.turn_gate("resume")
        session = await creation
        await client.close()
        record = (await stage.server.get(f"/sessions/{session.session_id}")).json()

    assert record["phase"] == "open"

"""The control plane repeats what may succeed later, and nothing else, in bounded time."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from harness.errors import SessionServerError
from harness.rollouts.client.session_server import Deadlines, SessionHandle, SessionServerClient
from harness.turn_ends import TurnStatus
from tests.controllers.aborting import eventually
from tests.session_servers.scripted import (
    HANG_UP,
    SAY_NOTHING,
    UNREADABLE,
    CannedServer,
    canned_server,
    http_answer,
    scripted_server,
)

CREATED = http_answer(200, {"session_id": "a1", "base_url": "http://h/sessions/a1", "api_key": "k", "later": 1})
GATE_CLOSED = http_answer(503, {"error": {"message": "draining", "code": "gate_closed"}}, "retry-after: 0")
LATER = http_answer(503, {"error": {"message": "draining", "code": "gate_closed"}}, "retry-after: 3600")
HTML = http_answer(502, b"<html>Bad Gateway</html>")
OPEN_GATE = {"state": "open", "epoch": 2, "held": 0, "sessions": 0, "turns_in_flight": 0}
FACTS = http_answer(200, {"session_id": "a1", "phase": "open", "turns": {"completed": 2}})


@asynccontextmanager
async def client_of(
    *answers: bytes, deadlines: Deadlines | None = None
) -> AsyncIterator[tuple[SessionServerClient, CannedServer]]:
    """A client of a server that gives `answers`."""
    async with canned_server(*answers) as server:
        client = SessionServerClient(server.url, deadlines=deadlines or Deadlines(create_s=30, read_s=30, delete_s=0.5))
        try:
            yield client, server
        finally:
            await client.close()


async def test_a_shut_gate_is_waited_for():
    """Creating continues when the gate opens in time."""
    async with client_of(GATE_CLOSED, GATE_CLOSED, CREATED) as (client, server):
        assert await client.create({}) == SessionHandle("a1", "http://h/sessions/a1", "k")
        assert server.requests == ["POST /sessions"] * 3


async def test_a_gate_that_opens_too_late_is_not_waited_for():
    """`Retry-After` beyond the deadline ends the wait at once."""
    async with client_of(LATER) as (client, server):
        with pytest.raises(SessionServerError) as caught:
            await client.create({})

    assert (caught.value.code, caught.value.status, len(server.requests)) == ("gate_closed", 503, 1)


async def test_creating_is_not_repeated_when_it_may_have_happened():
    """A lost answer would leave a session that nobody knows."""
    async with client_of(HANG_UP, CREATED) as (client, server):
        with pytest.raises(SessionServerError):
            await client.create({})

    assert len(server.requests) == 1


async def test_reading_is_repeated_after_a_lost_answer_and_a_broken_gateway():
    async with client_of(HANG_UP, HTML, FACTS) as (client, server):
        assert (await client.facts("a1")).turns == {TurnStatus.COMPLETED: 2}
        assert server.requests == ["GET /sessions/a1/facts"] * 3


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (
            http_answer(400, {"error": {"message": "limits.turns: too small", "code": "invalid_request"}}),
            "invalid_request",
        ),
        (http_answer(500, b"oops"), "unknown"),
        (http_answer(404, {"error": "a text"}), "unknown"),
        (http_answer(200, b"<html>"), "invalid_answer"),
        (http_answer(200, []), "invalid_answer"),
        (http_answer(200, {"session_id": 7}), "invalid_answer"),
    ],
)
async def test_an_answer_that_a_repetition_cannot_change_is_reported_at_once(answer: bytes, code: str):
    async with client_of(answer) as (client, server):
        with pytest.raises(SessionServerError) as caught:
            await client.create({})

    assert (caught.value.code, len(server.requests)) == (code, 1)


@pytest.mark.parametrize("answer", UNREADABLE.values(), ids=UNREADABLE.keys())
async def test_an_answer_that_cannot_be_decoded_is_an_error_of_the_server(answer: bytes):
    async with client_of(answer) as (client, _):
        with pytest.raises(SessionServerError):
            await client.facts("a1")


async def test_a_server_that_is_not_there_is_tried_until_the_deadline():
    client = SessionServerClient("http://127.0.0.1:9", deadlines=Deadlines(create_s=0.5))
    started = time.monotonic()
    with pytest.raises(SessionServerError) as caught:
        await client.create({})
    await client.close()

    assert (caught.value.code, caught.value.status) == ("unreachable", 0)
    assert 0.1 < time.monotonic() - started < 20


async def test_a_server_that_never_answers_costs_the_deadline():
    """Deleting runs while a rollout is cancelled, so it takes no longer than it may; one attempt may take 30 s."""
    async with client_of(SAY_NOTHING) as (client, _):
        started = time.monotonic()
        with pytest.raises(SessionServerError):
            await client.delete("a1")

    assert time.monotonic() - started < 20


async def test_a_verb_of_the_gate_asks_a_server_that_hangs_again():
    """Its attempts share the deadline."""
    async with client_of(SAY_NOTHING) as (client, server):
        with pytest.raises(SessionServerError):
            await client.gate("abort").drain(deadline_s=1.5)

    assert set(server.requests) == {"POST /sessions/drain"}
    assert len(server.requests) > 1


async def test_everybody_who_waits_at_a_gate_gets_a_session_when_it_opens():
    """A step's rollouts begin while weights are updated: more than a pool of connections, longer than an attempt."""
    deadlines = Deadlines(attempt_s=0.2)
    async with scripted_server() as server, SessionServerClient(server.url, deadlines=deadlines) as client:
        gate = client.gate("update")
        await gate.pause(deadline_s=5)
        creating = [asyncio.create_task(client.create({})) for _ in range(130)]
        await eventually(lambda: server.server.gatekeeper.held == 130)
        await asyncio.sleep(2 * deadlines.attempt_s)
        await gate.resume(deadline_s=5)
        sessions = await asyncio.gather(*creating)

    assert len({session.session_id for session in sessions}) == 130


async def test_a_client_that_was_closed_asks_nobody():
    """Whoever comes late is told so, and leaves no connection open."""
    async with client_of(FACTS) as (client, server):
        await client.close()
        with pytest.raises(SessionServerError, match="has been closed"):
            await client.facts("a1")

    assert server.requests == []


@pytest.mark.parametrize("verb", ["delete", "resume"])
async def test_control_does_not_wait_behind_collections(verb: str):
    """The end of 512 rollouts takes every connection that collecting may have, for as long as a server hangs."""
    answers, patient = [*[SAY_NOTHING] * 64, http_answer(200, OPEN_GATE)], Deadlines(attempt_s=100, read_s=100)
    async with client_of(*answers, deadlines=patient) as (client, server):
        collecting = [asyncio.create_task(client.collect(str(number))) for number in range(512)]
        await eventually(lambda: len(server.requests) == 64)
        if verb == "delete":
            await client.delete("a1")
        else:
            assert (await client.gate("update").resume(deadline_s=30)).state == "open"
        for task in collecting:
            task.cancel()
        await asyncio.gather(*collecting, return_exceptions=True)

    assert server.requests[64] in ("DELETE /sessions/a1", "POST /sessions/resume")

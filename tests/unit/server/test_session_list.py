"""`GET /sessions`: what each session waits for, the busiest first, and the totals of all."""

import asyncio

import httpx
import pytest
from msgspec import structs

from harness.engines.pool.pool import EnginePool
from harness.engines.scripted import ScriptedEngine, ScriptStep
from harness.rollouts.client.session_server import SessionServerClient
from harness.sessions.session import Session
from harness.sessions.session_config import SessionConfig
from server_patch.background import running
from tests.builders import toy_tokenizer, user
from tests.session_servers.served import Client, Served, eventually, serving, serving_with

LONG = ScriptStep(text="On and on it goes, and on, and on.", token_delay_s=30)


async def _states(client: Client) -> dict[str, str]:
    listed = (await client.http.get("/sessions")).json()["sessions"]
    return {each["session_id"]: each["state"] for each in listed}


async def test_each_session_says_what_it_waits_for():
    """An engine, the gate, its agent, or nothing any more, in order of creation; the totals have them all."""
    async with serving(LONG) as client, asyncio.TaskGroup() as calls:
        sampling, held, idle, ended = [await client.create() for _ in range(4)]
        first = calls.create_task(client.chat(sampling, [user("Begin.")]))
        await client.sampling()
        await client.http.post(f"/sessions/{ended.session_id}/drain")
        await client.http.post("/sessions/pause", json={"holder": "h"})
        second = calls.create_task(client.chat(held, [user("Begin.")]))
        await client.held(1)
        states = await _states(client)
        answer = (await client.http.get("/sessions")).json()
        [busy] = [each for each in answer["sessions"] if each["session_id"] == sampling.session_id]
        for task in (first, second):
            task.cancel()

    expected = {sampling: "engine", held: "held", idle: "tool", ended: "ended"}
    assert list(states.items()) == [(session.session_id, state) for session, state in expected.items()]
    assert answer["totals"]["states"] == {"engine": 1, "held": 1, "tool": 1, "ended": 1}
    assert (busy["turns"], busy["turns_in_flight"], busy["tokens"]) == (0, 1, 1)
    assert answer["totals"]["tokens"] == 1


async def test_tokens_of_turns_in_flight_are_counted_once_they_are_recorded(client, session):
    """A session's, and those of the server, which has them when the session is gone, too."""
    await client.say(session, [user("Begin.")])
    record = await client.record(session)
    [line] = (await client.http.get("/sessions")).json()["sessions"]
    await client.http.delete(f"/sessions/{session.session_id}")
    after = (await client.http.get("/sessions")).json()

    generated = record["ledger"]["generated"]
    assert generated > 0
    assert (line["turns"], line["tokens"], line["state"]) == (1, generated, "tool")
    assert after["sessions"] == []
    assert after["totals"] == {"states": {}, "turns": 1, "tokens": generated}


async def test_a_limited_list_has_the_busiest(client):
    """Of two that are idle the longer one; the totals count those that are left out."""
    sessions: list[Served] = [await client.create() for _ in range(3)]
    await client.say(sessions[1], [user("Begin.")])
    async with SessionServerClient(client.url) as server:
        listed = await server.busiest(1, deadline_s=10)
        looked = await server.look([sessions[2].session_id, "0" * 32], deadline_s=10)
        nothing = await server.look([], deadline_s=10)

    assert [each.session_id for each in listed.sessions] == [sessions[1].session_id]
    assert listed.totals.states == {"tool": 3}
    assert [each.session_id for each in looked] == [sessions[2].session_id]
    assert nothing == []


async def test_the_workers_of_a_pool_are_listed_with_the_version_they_serve():
    """And why one of them serves nobody."""
    pool = EnginePool([ScriptedEngine(toy_tokenizer()) for _ in range(2)])
    async with serving_with(pool) as client, SessionServerClient(client.url) as server:
        pool.workers.fence("1", "its weights are old")
        workers = (await server.busiest(1, deadline_s=10)).workers

    assert [(each.name, each.fence) for each in workers] == [("0", ""), ("1", "its weights are old")]
    assert {each.weight_version for each in workers} == {ScriptedEngine(toy_tokenizer()).weight_version}


NONSENSE = {
    "/sessions": ["limit=-1", "limit=x", "limit=", "limit=99999999999999", "&".join(["id=a"] * 101)],
    "/sessions/times": ["from=a", "from=a:", "from=a:-1", "from=a:x", "&".join(["from=a:0"] * 101)],
    "/sessions/holds": ["since=", "since=x", "since=nan", "since=inf", "since=1_0"],
    "/sessions/a": ["since=x"],
}


@pytest.mark.parametrize("path", NONSENSE)
async def test_a_query_that_cannot_be_meant_is_refused(client, path: str):
    """By its parameter."""
    answers = [await client.http.get(f"{path}?{query}") for query in NONSENSE[path]]

    told = [(answer.status_code, answer.json()["error"]["param"]) for answer in answers]
    assert told == [(400, query.partition("=")[0]) for query in NONSENSE[path]]


async def test_times_of_turns_are_told_from_an_index_on():
    """Of several sessions at once, turns in flight included; whoever asks uses none of them."""
    async with serving(ScriptStep(text="Understood."), LONG) as client, asyncio.TaskGroup() as calls:
        busy, idle = [await client.create() for _ in range(2)]
        first = await client.say(busy, [user("Begin.")])
        call = calls.create_task(client.chat(busy, [user("Begin."), first, user("More.")]))
        await client.sampling()
        [recorded] = (await client.record(busy))["turns"]
        async with SessionServerClient(client.url) as server:
            told = await server.times({busy.session_id: 0, idle.session_id: 0, "0" * 32: 0}, deadline_s=10)
            later = await server.times({busy.session_id: 1}, deadline_s=10)
        call.cancel()

    [done, sampling] = told.times[busy.session_id]
    assert (done.index, done.began_at, done.seconds) == (0, recorded["created_at"], recorded["seconds"])
    assert (sampling.index, sampling.seconds, sampling.status) == (1, None, "in_flight")
    assert done.began_at <= sampling.began_at <= told.now
    assert told.times.keys() == {busy.session_id, idle.session_id}
    assert later.times == {busy.session_id: [sampling]}


async def test_a_record_from_a_turn_on_has_of_earlier_ones_what_can_change():
    """A branch that was left behind is told by the reason why its first turn is in no sample any more."""
    async with serving(ScriptStep(text="Understood.")) as client, SessionServerClient(client.url) as server:
        session = await client.create()
        await client.say(session, [user("Left?")])
        await client.say(session, [user("Left?")])
        whole = await server.record(session.session_id)
        later = await server.record(session.session_id, 1)

    assert later["turns"][1] == whole["turns"][1]
    assert later["turns"][0]["dropped"] == "resample"
    assert later["turns"][0].items() <= whole["turns"][0].items()
    assert set(later["turns"][0]) == {
        "turn",
        "parent",
        "status",
        "role",
        "evidence",
        "output_length",
        "masked_from",
        "dropped",
        "delivered",
        "seconds",
    }
    assert {**later, "turns": []} == {**whole, "turns": []}


async def test_times_of_a_turn_that_went_on_again_are_told_whatever_is_asked_for():
    """While it is in flight and when it has ended: whoever asks for later ones has it as it broke off."""
    async with serving(LONG) as client, SessionServerClient(client.url) as server:
        session = await client.create()
        since = {session.session_id: 7}
        for _ in range(2):
            call = asyncio.create_task(client.chat(session, [user("Begin.")]))
            await client.turns_in_flight(1)
            await client.sampling()
            going_on = await server.times(since, deadline_s=10)
            call.cancel()
            await client.turns_in_flight(0)
        held = client.server.sessions.in_memory(session.session_id)
        await eventually(lambda: held is not None and not held.turns_in_flight)
        ended = await server.times(since, deadline_s=10)

    [sampling], [broken_off] = going_on.times[session.session_id], ended.times[session.session_id]
    assert (sampling.index, sampling.seconds, broken_off.index, broken_off.status) == (0, None, 0, "aborted")


async def test_an_answer_with_the_times_of_many_turns_says_what_is_left_off():
    """So it is short, and whoever asks again gets the rest."""
    async with serving(ScriptStep(text="Understood.")) as client, SessionServerClient(client.url) as server:
        sessions = await crowd(client, 3, turns=5_000)
        told = await server.times(dict.fromkeys(sessions, 0), deadline_s=10)
        rest = await server.times(dict.fromkeys(told.left_off, 0), deadline_s=10)

    assert (list(told.times), told.left_off) == (sessions[:2], sessions[2:])
    assert (list(rest.times), rest.left_off) == (sessions[2:], [])


async def test_others_are_served_while_thousands_of_sessions_are_listed(client):
    """The list is as long as they are many, and so the loop goes round more often while it is made."""
    few = await rounds_of_list(client)
    await crowd(client, 5_000)
    many = await rounds_of_list(client)
    assert many - few >= 20


async def rounds_of_list(client: Client) -> int:
    """How often somebody else has had his turn while all sessions were listed, without a connection to wait for."""
    rounds = 0

    async def go_round() -> None:
        nonlocal rounds
        while True:
            await asyncio.sleep(0)
            rounds += 1

    transport = httpx.ASGITransport(client.server.app())
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http, running(go_round()):
        assert (await http.get("/sessions")).status_code == 200
    return rounds


async def crowd(client: Client, count: int, *, turns: int = 0) -> list[str]:
    """The ids of so many sessions of the server, of which each has so many turns; one more has the turn itself."""
    first = await client.create()
    await client.say(first, [user("Begin.")])
    held = client.server.sessions.in_memory(first.session_id)
    assert held is not None
    ids = [f"{number:032x}" for number in range(count)]
    for session_id in ids:
        session = Session(session_id, f"sk-{session_id}", SessionConfig(), 1.0)
        for index in range(turns):
            session.restore(structs.replace(held.turns[0], index=index, ordinal=index))
        client.server.sessions._held.hold(session)
    return ids

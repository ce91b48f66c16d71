"""Holds on the gate over HTTP: whose they are, how they end, what survives a restart, and what is refused."""

import asyncio
import json
import time
from pathlib import Path

import pytest

from harness.engines.base import PauseMode
from harness.engines.scripted import Script, ScriptedEngine
from harness.errors import EngineUnavailable
from harness.rollouts.client.session_server import SessionServerClient
from harness.server.store.sqlite import SQLiteStore, open_store
from harness.sessions.gate import Hold, HoldKind
from tests.builders import toy_tokenizer, user
from tests.session_servers.served import SetClock, eventually, says, serving, serving_with, session_on

HI = [user("hi")]


async def verb(client, name, holder=None, **fields):
    """What a verb of the gate answers to `holder`."""
    body = ({"holder": holder} if holder else {}) | fields
    return await client.http.post(f"/sessions/{name}", json=body)


async def test_the_gate_lists_its_holds(client):
    """Who, what, and for how long; a bare verb lasts an hour, a named one a minute."""
    await verb(client, "pause")
    await verb(client, "pause", "update", engines=True)
    await verb(client, "drain", "abort", ttl_s=50)
    report = await client.gate()

    assert report["state"] == "draining"
    assert [(hold["holder"], hold["kind"], hold["engines"]) for hold in report["holds"]] == [
        ("anonymous", "pause", False),
        ("update", "pause", True),
        ("abort", "drain", False),
    ]
    seconds = [hold["ends_in_s"] for hold in report["holds"]]
    assert [0 < left <= most for left, most in zip(seconds, (3600, 60, 50), strict=True)] == [True] * 3
    assert seconds[0] > 3000


async def test_a_server_says_what_had_held_its_gate(tmp_path: Path):
    """By whom, how and when; the next server on its store does too. One that ran out has ended."""
    store, clock = tmp_path / "run.db", SetClock()
    clock.now = began = time.time()  # the store notes by the clock of the machine
    async with serving(store=store, clock=clock) as client:
        await verb(client, "pause", "update", engines=True)
        await verb(client, "drain", "abort", ttl_s=60)
        clock.now += 0.5
        await verb(client, "resume", "update", engines_continued=True)
        first = (await client.http.get("/sessions/holds")).json()
        clock.now += 60
        await client.server.gatekeeper.expire()
        later = (await client.http.get(f"/sessions/holds?since={first['now'] + 1}")).json()
    async with serving(store=store) as client, SessionServerClient(client.url) as server:
        kept = await server.hold_times(deadline_s=10)

    assert first == {
        "now": began + 0.5,
        "holds": [
            {"holder": "update", "kind": "pause", "engines": True, "began_at": began, "ended_at": began + 0.5},
            {"holder": "abort", "kind": "drain", "engines": False, "began_at": began, "ended_at": None},
        ],
    }
    assert [(each["holder"], each["ended_at"]) for each in later["holds"]] == [("abort", began + 60.5)]
    assert [(each.holder, each.kind, each.engines) for each in kept.holds] == [
        ("update", "pause", True),
        ("abort", "drain", False),
    ]
    assert all(abs(each.began_at - began) < 30 and each.ended_at is not None for each in kept.holds)


async def test_a_hold_that_nobody_renews_ends_by_itself_and_is_counted(client, session):
    """Its controller has died: what waits continues, and the log and the metrics say why."""
    await verb(client, "pause", "dead", ttl_s=0.1)
    message = await client.say(session, HI)
    metrics = (await client.http.get("/metrics")).text
    late = await verb(client, "resume", "dead")
    again = await verb(client, "pause", "dead")
    report = await client.gate()

    assert message["content"] == "one"
    assert "harness_gate_holds_expired_total 1.0" in metrics
    assert [(answer.status_code, answer.json()["error"]["code"]) for answer in (late, again)] == [
        (409, "hold_expired")
    ] * 2
    assert (report["state"], report["holds"]) == ("open", [])


BAD = [
    ({"holder": ""}, "holder"),
    ({"holder": 7}, "holder"),
    ({"holder": "x" * 201}, "holder"),
    ({"ttl_s": 0}, "ttl_s"),
    ({"ttl_s": -1}, "ttl_s"),
    ({"ttl_s": 86_401}, "ttl_s"),
    ({"ttl_s": "60"}, "ttl_s"),
    ({"ttl_s": True}, "ttl_s"),
    ({"engines": "yes"}, "engines"),
    ({"holde": "x"}, None),
    (["holder"], None),
    *((content, None) for content in (b"{", b'{"holder": "\\ud800"}', b"\xff", b'{"ttl_s": NaN}')),
]


@pytest.mark.parametrize("name", ["pause", "drain"])
async def test_a_body_that_makes_no_sense_is_refused_and_changes_nothing(client, name):
    """One 400 that names the field."""
    contents = [body if isinstance(body, bytes) else json.dumps(body) for body, _ in BAD]
    answers = [await client.http.post(f"/sessions/{name}", content=content) for content in contents]
    report = await client.gate()

    assert {(each.status_code, each.json()["error"]["code"]) for each in answers} == {(400, "invalid_request")}
    assert [each.json()["error"]["param"] for each in answers] == [param for _, param in BAD]
    assert (report["state"], report["holds"]) == ("open", [])


# Restarts


async def test_holds_survive_a_restart(tmp_path):
    """A server that comes back in the middle of an update is still paused, until the hold is released or runs out."""
    store = tmp_path / "sessions.db"
    async with session_on(*says("hello"), store=store) as (client, session):
        await verb(client, "pause", "update", engines=True)
        await verb(client, "drain", "abort")
        await verb(client, "resume", "abort")
        await verb(client, "pause", "short", ttl_s=0.1)
        await eventually(lambda: len(client.server.gatekeeper.gate.holds) == 1)
    async with serving(*says("hello"), store=store) as client:
        report = await client.gate()
        late = await client.chat(session, HI)
        await verb(client, "resume", "update", engines_continued=True)
        fresh = await client.say(await client.create(), HI)
    async with serving(store=store) as client:
        last = await client.gate()

    assert (report["state"], [hold["holder"] for hold in report["holds"]]) == ("paused", ["update"])
    assert (late.status_code, fresh["content"]) == (404, "hello")
    assert (last["state"], last["holds"]) == ("open", [])


class SlowStore(SQLiteStore):
    """A store that notes phases when it is told to."""

    def __init__(self, path) -> None:
        super().__init__(path)
        self.disk = asyncio.Event()
        self.waiting = 0

    async def set_phase(self, session) -> None:
        self.waiting += 1
        await self.disk.wait()
        await super().set_phase(session)


async def test_a_drain_that_was_released_while_it_was_made_durable_does_not_come_back(tmp_path):
    """Its holder gave up waiting and released it; the next server is open, and not shut until the hold runs out."""
    store, engine = SlowStore(tmp_path / "sessions.db"), ScriptedEngine(toy_tokenizer())
    async with serving_with(engine, store=store) as client:
        http = client.http
        await http.post("/sessions")
        draining = asyncio.create_task(http.post("/sessions/drain", json={"holder": "abort", "ttl_s": 3600}))
        await eventually(lambda: store.waiting == 1)
        released = await http.post("/sessions/resume", json={"holder": "abort"})
        store.disk.set()
        drained = await draining
    async with serving(store=tmp_path / "sessions.db") as client:
        after = await client.gate()

    assert (released.status_code, drained.json()["sessions_closed"]) == (200, 1)
    assert (after["state"], after["holds"]) == ("open", [])


async def test_a_hold_that_ran_out_while_the_server_was_down_is_over(tmp_path):
    """Its holder is told when it comes back."""
    store = tmp_path / "sessions.db"
    async with open_store(store) as kept:
        await kept.keep_hold(Hold("dead", HoldKind.PAUSE, until=1.0))
    async with serving(store=store) as client:
        report = await client.gate()
        late = await verb(client, "resume", "dead")

    assert (report["state"], late.status_code) == ("open", 409)


# Engines under a hold


async def test_engines_that_a_dead_controller_left_paused_are_continued():
    """When its hold runs out; the turn that waited in the engine is answered."""
    clock = SetClock()
    async with serving(*says("hello"), clock=clock) as client:
        session = await client.create()
        await verb(client, "pause", "update", engines=True, ttl_s=60)
        await client.engine.pause(PauseMode.ABORT)
        turn = asyncio.create_task(client.say(session, HI))
        await client.held(1)
        clock.now += 61
        client.server.gatekeeper.look_again()
        message = await turn
        metrics = (await client.http.get("/metrics")).text

    assert message["content"] == "hello"
    assert "harness_engines_woken_total 1.0" in metrics


@pytest.mark.parametrize("name", ["pause", "drain", "renew", "resume"])
async def test_engines_that_a_late_controller_paused_are_continued(client, name):
    """It learns that its hold ran out by whatever verb comes first, and has paused them since."""
    await verb(client, "pause", "update", engines=True, ttl_s=0.05)
    await eventually(lambda: not client.server.gatekeeper.gate.holds)
    await eventually(lambda: not client.server.gatekeeper.gate.left)
    await client.engine.pause(PauseMode.ABORT)
    late = await verb(client, name, "update")
    await eventually(client.engine._running.is_set)

    assert late.json()["error"]["code"] == "hold_expired"


class Stubborn(ScriptedEngine):
    """Refuses to continue for a while."""

    refuses = True
    asked = 0

    async def resume(self):
        """See `TokenProvider`."""
        self.asked += 1
        if self.refuses:
            raise EngineUnavailable("worker http://10.0.0.7:30000 answered /continue_generation with 500")
        await super().resume()


async def test_health_names_the_engine_that_was_left_paused_until_it_goes_on():
    """It is asked again and again."""
    engine = Stubborn(toy_tokenizer(), Script(says("hello")))
    async with serving_with(engine) as client:
        http = client.http
        well = await http.get("/health")
        await http.post("/sessions/pause", json={"holder": "update", "engines": True})
        await engine.pause(PauseMode.ABORT)
        held = await http.get("/health")
        await http.post("/sessions/resume", json={"holder": "update"})
        await eventually(lambda: engine.asked > 1)
        left = await http.get("/health")
        engine.refuses = False
        await eventually(lambda: client.server.left_engines.problem is None)
        again = await http.get("/health")

    assert [answer.status_code for answer in (well, held, left, again)] == [200, 200, 503, 200]
    assert left.json()["status"] == "engine_paused"
    assert "http://10.0.0.7:30000" in left.json()["engine"]["left_paused"]
    assert "'update'" in left.json()["engine"]["left_paused"]


async def test_a_server_that_dies_while_engines_are_left_continues_them_when_it_is_back(tmp_path):
    """The hold is in the store until somebody has continued them."""
    store = tmp_path / "sessions.db"
    async with serving_with(Stubborn(toy_tokenizer()), store=store) as client:
        await verb(client, "pause", "update", engines=True)
        await verb(client, "resume", "update")
        await eventually(lambda: client.engine.asked > 0)
    async with serving(store=store) as client:
        await eventually(lambda: not client.server.gatekeeper.gate.left)
        report = await client.gate()
        metrics = (await client.http.get("/metrics")).text

        assert report["state"] == "open"
        assert "harness_engines_woken_total 1.0" in metrics
    async with serving(store=store) as client:
        assert not client.server.gatekeeper.gate.left
        assert (await client.http.get("/metrics")).text.count("harness_engines_woken_total 0.0") == 1


async def test_engines_that_go_on_at_last_leave_the_next_anonymous_hold_in_the_store(tmp_path):
    """A bare pause that was placed while those of the one before were still being continued survives a restart."""
    engine = Stubborn(toy_tokenizer())
    async with serving_with(engine, store=tmp_path / "sessions.db") as client:
        await verb(client, "pause", engines=True)
        await verb(client, "resume")
        await eventually(lambda: engine.asked > 0)
        paused = (await verb(client, "pause")).json()
        engine.refuses = False
        await eventually(lambda: not client.server.gatekeeper.gate.left)
    async with serving(store=tmp_path / "sessions.db") as client:
        after = await client.gate()

    assert (paused["state"], after["state"]) == ("paused", "paused")

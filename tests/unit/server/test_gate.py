"""The gate over HTTP, row by row: open, paused, draining."""

import asyncio
import sqlite3
import threading
from collections.abc import Sequence
from contextlib import closing

import httpx
import pytest

from harness.engines.scripted import Script, ScriptedEngine, ScriptedFault, ScriptStep
from harness.server.gatekeeper import Gatekeeper
from harness.server.settings import ServerSettings
from harness.server.store.base import MemoryStore
from harness.server.telemetry.metrics import ServerMetrics
from harness.sessions.gate import HoldKind, HoldRequest, ReleaseRequest, Work
from harness.tokens.templates.chat_template import ChatTemplateTokenizer
from harness.types import Json, Message
from tests.builders import patient_client, toy_template, toy_tokenizer, user
from tests.session_servers.served import PATIENCE_S, eventually, says, serving, serving_with, session_on
from tests.session_servers.store_file import read_file

HI = [user("hi")]
IMPATIENT = ServerSettings(pause_timeout_s=0.05)
SLOW = ScriptStep(text="slow", delay_s=0.1)


async def test_a_paused_gate_holds_turns_and_serves_them_after_resume(client, session):
    """The agent notices nothing but time; resume says how many it released."""
    paused = (await client.http.post("/sessions/pause")).json()
    request = asyncio.create_task(client.say(session, HI))
    await client.held(1)
    report = await client.gate()
    resumed = (await client.http.post("/sessions/resume")).json()
    message = await request

    assert (paused["state"], paused["changed"], report["held"], report["turns_in_flight"]) == ("paused", True, 1, 0)
    assert (resumed["state"], resumed["changed"], resumed["released"]) == ("open", True, 1)
    assert message["content"] == "one"


@pytest.mark.parametrize("work", ["create", "turn"])
async def test_holding_is_bounded(work):
    """After the pause timeout: 503 with Retry-After, which clients retry; nothing is recorded."""
    async with session_on(settings=IMPATIENT) as (client, session):
        await client.http.post("/sessions/pause")
        answer = await (client.http.post("/sessions") if work == "create" else client.chat(session, HI))
        report = await client.gate()

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "gate_closed")
    assert int(answer.headers["retry-after"]) > 0
    assert "x-should-retry" not in answer.headers
    assert (report["held"], report["turns_in_flight"]) == (0, 0)


async def test_reading_and_deleting_pass_a_paused_gate(client, session):
    """Only new work waits."""
    await client.say(session, HI)
    await client.http.post("/sessions/pause")
    record = await client.record(session)
    deleted = await client.http.delete(f"/sessions/{session.session_id}")

    assert (len(record["turns"]), deleted.status_code) == (1, 204)


async def test_a_draining_gate_ends_open_sessions_for_good(client, session):
    """404 while draining and after resume; sessions created later are served; what was recorded stays."""
    message = await client.say(session, HI)
    drained = (await client.http.post("/sessions/drain")).json()
    while_draining = await client.chat(session, [*HI, message, user("more")])
    await client.http.post("/sessions/resume")
    after_resume = await client.chat(session, [*HI, message, user("more")])
    record = await client.record(session)
    fresh = await client.say(await client.create(), HI)

    assert (drained["state"], drained["changed"], drained["sessions_closed"]) == ("draining", True, 1)
    for answer in (while_draining, after_resume):
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "session_closed")
        assert answer.headers["x-should-retry"] == "false"
    assert (record["phase"], len(record["turns"]), record["refusals"]) == ("closing", 1, {"session_closed": 2})
    assert fresh["content"] == "one"


async def test_a_draining_gate_creates_nothing(client):
    """503 with Retry-After until resume."""
    await client.http.post("/sessions/drain")
    refused = await client.http.post("/sessions")
    await client.http.post("/sessions/resume")
    created = await client.http.post("/sessions")

    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "gate_closed")
    assert int(refused.headers["retry-after"]) > 0
    assert created.status_code == 200


async def test_a_drain_loses_no_turn_in_flight():
    """What was admitted is recorded and, complete as it is, answered."""
    async with session_on(SLOW) as (client, session):
        request = asyncio.create_task(client.chat(session, HI))
        await client.turns_in_flight(1)
        await client.http.post("/sessions/drain")
        answer = await request
        record = await client.record(session)

    assert answer.status_code == 200
    assert ([turn["status"] for turn in record["turns"]], record["phase"]) == (["completed"], "closing")


async def test_a_drain_turns_held_work_away(client, session):
    """Paused, then drained: a held turn gets its terminal answer, a held creation is asked to come again."""
    await client.http.post("/sessions/pause")
    turn = asyncio.create_task(client.chat(session, HI))
    create = asyncio.create_task(client.http.post("/sessions"))
    await client.held(2)
    await client.http.post("/sessions/drain")

    assert ((await turn).status_code, (await create).status_code) == (404, 503)


@pytest.mark.parametrize("rounds", range(8))
async def test_a_drain_that_comes_while_a_session_is_created_does_not_miss_it(client, rounds):
    """Wherever the creation stands by then: what has passed the gate is closed by the drain."""
    transport = httpx.ASGITransport(client.server.app())
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        creation = asyncio.create_task(http.post("/sessions"))
        for _ in range(rounds):
            await asyncio.sleep(0)
        await http.post("/sessions/drain")
        await creation

    assert (await client.gate())["sessions_open"] == 0


class SlowTemplate(ChatTemplateTokenizer):
    """Encodes a prompt for as long as the test wants."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()  # while the family is examined
        super().__init__(toy_tokenizer(), toy_template().template)

    def render_ids(self, messages: Sequence[Message], tools: Sequence[Json]) -> list[int]:
        self.has_begun.set()
        assert self.may_end.wait(PATIENCE_S), "nobody lets it end"
        return super().render_ids(messages, tools)


async def test_a_long_prompt_does_not_stop_the_server_and_a_drain_meanwhile_is_seen():
    """It is encoded in a thread; a drain that comes meanwhile is served, and the turn does not start."""
    engine, template = ScriptedEngine(toy_tokenizer(), Script(says("hello")), context_length=1 << 20), SlowTemplate()
    async with serving_with(engine, chat_tokenizer=template) as client:
        session = await client.create()
        template.has_begun.clear()
        template.may_end.clear()
        request = asyncio.create_task(client.chat(session, [user("x" * 100_000)]))
        await eventually(template.has_begun.is_set)
        await client.http.post("/sessions/drain")
        template.may_end.set()
        answer = await request
        record = await client.record(session)

    assert (answer.status_code, record["turns"]) == (404, [])


@pytest.mark.parametrize("verb", ["drain", "pause", "resume"])
async def test_verbs_are_idempotent_and_report(client, verb):
    """The second time nothing changes, and the answer says so."""
    await client.create()
    await client.http.post("/sessions/pause" if verb == "resume" else "/sessions/resume")
    first, second = [(await client.http.post(f"/sessions/{verb}")).json() for _ in range(2)]

    assert (first["changed"], second["changed"]) == (True, False)
    assert (first["state"], first["epoch"]) == (second["state"], second["epoch"])
    assert second.get("sessions_closed", 0) == second.get("released", 0) == 0


async def test_a_server_leaves_no_task_and_no_socket_behind():
    """After the block, only this test's own task runs, and the address is free again."""
    async with serving(*says("hello")) as client:
        await client.say(await client.create(), HI)
        host, _, port = client.url.removeprefix("http://").partition(":")

    assert asyncio.all_tasks() == {asyncio.current_task()}
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(host, int(port))


async def test_a_drain_is_durable_before_it_is_answered(tmp_path):
    """An independent reader of the file finds every session marked as soon as the answer is there."""
    async with serving(*says("hello"), store=tmp_path / "sessions.db") as client:
        for session in [await client.create() for _ in range(5)]:
            await client.say(session, HI)
        drained = (await client.http.post("/sessions/drain")).json()
        stored = read_file(tmp_path / "sessions.db")

    assert (drained["sessions_closed"], drained["sessions_open"], drained["sessions"]) == (5, 0, 5)
    assert [session.phase for session in stored.values()] == ["closing"] * 5


async def test_a_drain_that_the_store_cannot_keep_says_so_and_is_kept_the_next_time(tmp_path):
    """503, which whoever drains repeats; meanwhile no turn is served."""
    path = tmp_path / "sessions.db"
    async with session_on(*says("hello"), store=path) as (client, session):
        refuse = "CREATE TRIGGER refuse BEFORE UPDATE ON sessions BEGIN SELECT RAISE(ABORT, 'disk trouble'); END"
        change_file(path, refuse)
        failed = await client.http.post("/sessions/drain")
        turn = await client.chat(session, HI)
        change_file(path, "DROP TRIGGER refuse")
        drained = await client.http.post("/sessions/drain")

    assert (failed.status_code, failed.json()["error"]["code"]) == (503, "store_failed")
    assert turn.status_code == 404
    assert (drained.status_code, drained.json()["sessions_closed"]) == (200, 0)
    assert [each.phase for each in read_file(path).values()] == ["closing"]


async def test_the_gate_tells_turns_that_wait_from_turns_that_are_generated():
    """Whoever pauses knows by that when the engines are idle."""
    async with session_on(ScriptStep(text="abc", fault=ScriptedFault.HANG, fault_after=2)) as (client, session):
        request = asyncio.create_task(client.chat(session, HI))
        await client.turns_in_flight(1)
        paused = (await client.http.post("/sessions/pause")).json()
        await client.engine.abort(None)
        await client.held(1)
        waiting = await client.gate()
        await client.http.post("/sessions/resume")
        answer = await request

    assert (paused["turns_in_flight"], paused["turns_held"]) == (1, 0)
    assert (waiting["turns_in_flight"], waiting["turns_held"], waiting["held"]) == (1, 1, 1)
    assert answer.json()["choices"][0]["message"]["content"] == "abc"


async def test_a_turn_that_has_not_reached_the_engine_when_the_drain_comes_does_not():
    """It waits to be sent again after a failure; the drain ends it, whatever the engine said."""
    failing = ScriptStep(fault=ScriptedFault.UNAVAILABLE)
    settings = ServerSettings(engine_attempts=3, engine_retry_s=3)
    async with session_on(failing, settings=settings) as (client, session):
        request = asyncio.create_task(client.chat(session, HI))
        await eventually(lambda: client.engine.played.total() == 1 and not client.engine.live)
        await client.http.post("/sessions/drain")
        answer = await request
        record, played = await client.record(session), client.engine.played.total()

    assert played == 1
    assert (answer.status_code, answer.headers["x-should-retry"]) == (404, "false")
    assert answer.json()["error"]["code"] == "turn_aborted"
    assert [(turn["status"], turn["end"]) for turn in record["turns"]] == [("aborted", "drained")]


def change_file(path, statement):
    """Run a statement of somebody else on the store's file."""
    with closing(sqlite3.connect(path, timeout=10)) as connection, connection:
        connection.execute(statement)


async def test_those_who_were_held_go_on_a_few_at_a_time():
    """Thousands that begin in one round of the event loop would keep every other stream from its signs of life."""
    store, begun = MemoryStore(), 0
    gatekeeper = Gatekeeper(store, ServerMetrics(), pause_timeout_s=PATIENCE_S)

    async def enter() -> None:
        nonlocal begun
        await gatekeeper.enter(Work.TURN, patient_client())
        begun += 1

    gatekeeper.place(HoldRequest(), HoldKind.PAUSE)
    waiting = [asyncio.create_task(enter()) for _ in range(200)]
    await eventually(lambda: gatekeeper.held == 200)
    await gatekeeper.release(ReleaseRequest())
    at_once = []
    while begun < 200:
        before = begun
        await asyncio.sleep(0)
        at_once.append(begun - before)
    await asyncio.gather(*waiting)

    assert max(at_once) <= 16
    assert gatekeeper.held == 0

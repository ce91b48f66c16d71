"""Turns that are ended from outside: by a drain, by the owner who collects. Each ends, whatever its engine does."""

import asyncio
import sqlite3
from contextlib import closing

import pytest

from harness.engines.base import PauseMode
from harness.engines.scripted import Script, ScriptedEngine, ScriptedFault, ScriptStep
from harness.server.settings import ServerSettings
from harness.server.store.base import MemoryStore
from tests.builders import toy_tokenizer, user
from tests.session_servers.served import PATIENCE_S, eventually, says, serving, serving_with, session_on

HI = [user("hi")]
HANG = ScriptStep(text="never to be said", fault=ScriptedFault.HANG, fault_after=3, token_delay_s=0.01)
CUT = ScriptStep(text="a long and slow answer", fault=ScriptedFault.HANG, fault_after=4)


class DeafEngine(ScriptedEngine):
    """Hangs in its requests, and hears no abort."""

    is_deaf = True

    async def abort(self, request_id: str | None) -> int:
        return 0 if self.is_deaf else await super().abort(request_id)


def grace(seconds: float) -> ServerSettings:
    return ServerSettings(drain_grace_s=seconds)


async def test_a_drained_turn_of_an_engine_that_never_answers_ends():
    """404, ABORTED with what an earlier request had brought, and nothing is in flight."""
    long = ScriptStep(text="a long and slow answer" * 50, token_delay_s=0.01)
    engine = DeafEngine(toy_tokenizer(), Script((long,)))
    async with serving_with(engine, settings=grace(0.2)) as client:
        session = await client.create()
        request = asyncio.create_task(client.chat(session, HI))
        await client.sampling()
        await client.http.post("/sessions/pause")
        engine.is_deaf = False
        await engine.abort(None)
        await client.held(1)
        engine.is_deaf = True
        await client.http.post("/sessions/resume")
        await client.turns_in_flight(1)
        await engine.pause(PauseMode.KEEP)
        await client.http.post("/sessions/drain")
        answer = await request
        record, gate = await client.record(session), await client.gate()
        [sample] = await client.samples(session)

    [turn] = record["turns"]
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "turn_aborted")
    assert (turn["status"], turn["end"], gate["turns_in_flight"]) == ("aborted", "drained", 0)
    assert 0 < len(turn["output_ids"]) == sum(sample["loss_mask"]) == record["ledger"]["generated"]


async def test_one_session_can_be_drained():
    """Its turn that waits at the gate is refused, its next one too, for good; the gate and everybody else stay as they
    were. Asked again, or for a session that is none, it changes nothing.
    """
    async with serving(*says("a", "b", "c")) as client:
        mine, other = await client.create(), await client.create()
        await client.say(mine, HI)
        await client.http.post("/sessions/pause")
        held = asyncio.create_task(client.chat(mine, [user("held")]))
        await client.held(1)
        drained = [(await client.http.post(f"/sessions/{mine.session_id}/drain")).json() for _ in range(2)]
        answer = await held
        await client.http.post("/sessions/resume")
        refused = await client.chat(mine, HI)
        await client.say(other, HI)
        unknown = (await client.http.post(f"/sessions/{'f' * 32}/drain")).json()

    assert [each["phase"] for each in drained] == ["closing", "closing"]
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "session_closed")
    assert refused.status_code == 404
    assert unknown["phase"] == "unknown"


@pytest.mark.parametrize("is_drained", [False, True])
async def test_draining_one_session_ends_its_requests_in_the_engine(is_drained):
    """By their ids and at once, also in the grace of a drain of all: the turn of the other session continues."""
    async with serving(HANG, HANG, settings=grace(2 * PATIENCE_S)) as client:
        mine, other = await client.create(), await client.create()
        cut, left = (asyncio.create_task(client.chat(session, HI)) for session in (mine, other))
        await eventually(lambda: len([live for live in client.engine.live if live.sampled]) == 2)
        if is_drained:
            await client.http.post("/sessions/drain")
        await client.http.post(f"/sessions/{mine.session_id}/drain")
        answer = await asyncio.wait_for(cut, PATIENCE_S / 2)
        await eventually(lambda: len(client.engine.live) == 1)
        goes_on = not left.done()
        record = await client.record(mine)
        left.cancel()

    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "turn_aborted")
    assert [turn["status"] for turn in record["turns"]] == ["aborted"]
    assert goes_on


async def test_ending_a_session_ends_what_its_agent_left_in_flight(tmp_path):
    """The late call is answered 404, its tokens are undelivered, and the agent's sample is what it was."""
    async with session_on(*says("done"), HANG, store=tmp_path / "s.db") as (client, session):
        await client.say(session, HI)
        late = asyncio.create_task(client.chat(session, [user("a helper that outlives its agent")]))
        await client.sampling()
        ended = await client.http.post(f"/sessions/{session.session_id}/end")
        answer = await late
        refused = await client.chat(session, HI)
        record = await client.record(session)
        [sample] = await client.samples(session)
    async with serving(store=tmp_path / "s.db") as client:
        after_restart = await client.record(session)

    assert (ended.json()["phase"], ended.json()["turns_in_flight"]) == ("ended", 0)
    assert [each.json()["error"]["code"] for each in (answer, refused)] == ["session_closed"] * 2
    assert {each.headers["x-should-retry"] for each in (answer, refused)} == {"false"}
    assert (record["refusals"], sample["metadata"]["turns"], sample["status"]) == ({}, [0], "completed")
    assert record["ledger"]["dropped"] == {"undelivered": len(record["turns"][1]["output_ids"])}
    assert (after_restart["phase"], after_restart["ledger"]) == ("ended", record["ledger"])


async def test_ending_a_session_that_was_drained_leaves_it_drained():
    """What a drain cut short is ABORTED and trained, whoever collects meanwhile."""
    async with session_on(HANG) as (client, session):
        request = asyncio.create_task(client.chat(session, HI))
        await client.sampling()
        await client.http.post("/sessions/drain")
        ended = await client.http.post(f"/sessions/{session.session_id}/end")
        await request
        [sample] = await client.samples(session)

    assert (ended.json()["phase"], sample["status"]) == ("closing", "aborted")


async def test_ending_waits_no_longer_than_it_was_told():
    """The answer says what is left in flight."""
    engine = DeafEngine(toy_tokenizer(), Script((HANG,)))
    async with serving_with(engine) as client:
        session = await client.create()
        request = asyncio.create_task(client.chat(session, HI))
        await client.sampling()
        ended = await client.http.post(f"/sessions/{session.session_id}/end", json={"within_s": 0.01})
        engine.is_deaf = False
        await engine.abort(None)
        await request

    assert ended.json()["turns_in_flight"] == 1


async def test_a_call_at_the_gate_ends_with_its_session_although_the_store_failed(tmp_path):
    """The DELETE is 503 and may be repeated; nobody waits at the gate for a session that is over."""
    path = tmp_path / "s.db"
    async with session_on(store=path) as (client, session):
        await client.http.post("/sessions/pause")
        request = asyncio.create_task(client.chat(session, HI))
        await client.held(1)
        with closing(sqlite3.connect(path)) as operator:
            operator.execute("CREATE TRIGGER t BEFORE UPDATE ON sessions BEGIN SELECT RAISE(ABORT, 'no'); END")
            operator.commit()
        deleted = await client.http.delete(f"/sessions/{session.session_id}")
        answer = await request

    assert (deleted.status_code, answer.status_code) == (503, 404)


@pytest.mark.parametrize("is_deleted", [False, True])
async def test_a_turn_that_ends_with_its_session_before_its_first_token_answers_nobody(is_deleted):
    """404, and never an answer without words that no file holds."""
    async with session_on(ScriptStep(text="late", delay_s=60)) as (client, session):
        request = asyncio.create_task(client.chat(session, HI))
        await client.turns_in_flight(1)
        path = f"/sessions/{session.session_id}"
        await (client.http.delete(path) if is_deleted else client.http.post(f"{path}/end"))
        answer = await request

    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "session_closed")


class HandingOverStore(MemoryStore):
    """Has the engine hand over what it has at the very moment at which a session ends."""

    engine: ScriptedEngine

    async def set_phase(self, session) -> None:
        """See `SessionStore`."""
        del session
        await self.engine.abort(None)


async def test_a_partial_that_arrives_in_the_moment_of_the_end_is_no_sample():
    """As if it had come a moment later: it waits for a successor, and is `undelivered`."""
    engine, store = ScriptedEngine(toy_tokenizer(), Script((CUT,))), HandingOverStore()
    store.engine = engine
    async with serving_with(engine, store=store) as client:
        session = await client.create()
        request = asyncio.create_task(client.chat(session, HI))
        await client.sampling()
        await client.http.post(f"/sessions/{session.session_id}/end")
        answer = await request
        record, samples = await client.record(session), await client.samples(session)

    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "session_closed")
    assert [turn["end"] for turn in record["turns"]] == ["session_ended"]
    assert (record["ledger"]["dropped"], samples) == ({"undelivered": 4}, [])


async def test_an_ended_session_may_be_taken_over():
    """Its successor continues with what was cut short: nothing is sampled twice."""
    async with session_on(CUT) as (client, session):
        request = asyncio.create_task(client.chat(session, HI))
        await client.sampling()
        await client.http.post(f"/sessions/{session.session_id}/end")
        await request
        successor = await client.create(resumes=session.session_id)
        client.engine.play_from(successor.session_id, 1)  # the step that was cut, as a model would continue
        message = await client.say(successor, HI)
        record = await client.record(successor)

    assert message["content"] == CUT.text
    assert [len(turn["segments"]) for turn in record["turns"]] == [2]


@pytest.mark.parametrize("body", [b'{"within_s": -1}', b'{"within_s": "x"}', b'{"unknown": 1}', b"[]", b"{"])
async def test_a_body_that_ends_nothing_changes_nothing(client, session, body):
    """400, and the session continues."""
    answer = await client.http.post(f"/sessions/{session.session_id}/end", content=body)
    phase = (await client.record(session))["phase"]

    assert (answer.status_code, phase) == (400, "open")

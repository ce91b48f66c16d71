"""Turns that an engine cut short: continued when that may be, ended when it may not, and never twice the same token."""

import asyncio
from dataclasses import replace

import pytest

from harness.engines.base import PauseMode
from harness.engines.scripted import ScriptedFault, ScriptStep
from harness.server.settings import ServerSettings
from tests.builders import EOS, toy_tokenizer, user
from tests.session_servers.served import eventually, says, serving, session_on
from tests.session_servers.store_file import NONE_UNKNOWN

HI = [user("hi")]
SLOW = ScriptStep(text="a long and slow answer", token_delay_s=0.05)


def ids(text: str) -> list[int]:
    return toy_tokenizer().encode_plain(text)


async def test_a_turn_that_a_pause_cut_short_goes_on_after_it():
    """The agent sees one answer; the record shows two segments, and all tokens are trained."""
    async with serving(SLOW) as client:
        session = await client.create(sampling={"seed": 1})
        request = asyncio.create_task(client.chat(session, HI))
        await client.sampling()
        await client.http.post("/sessions/pause")
        await client.engine.pause(PauseMode.ABORT)
        await client.held(1)
        await client.engine.update_weights(None, "1")
        await client.engine.resume()
        await client.http.post("/sessions/resume")
        answer = await request
        [turn] = (await client.record(session))["turns"]
        record = await client.record(session)

    assert answer.json()["choices"][0]["message"]["content"] == SLOW.text
    assert (turn["status"], turn["output_ids"]) == ("completed", [*ids(SLOW.text), EOS])
    assert [span["version"] for span in turn["weight_versions"]] == ["0", "1"]
    assert [each["finish_reason"] for each in turn["segments"]] == ["abort", "stop"]
    assert record["ledger"] == {"generated": 23, "trained": 23, "masked": 0, "dropped": {}, "unknown": NONE_UNKNOWN}


async def test_a_record_says_where_the_seconds_of_a_turn_went(tmp_path):
    """Held before its admission, asked, held in the middle, asked again; a store says the same after a restart."""
    async with session_on(SLOW, store=tmp_path / "sessions.db") as (client, session):
        await client.http.post("/sessions/pause")
        request = asyncio.create_task(client.chat(session, HI))
        await client.held(1)
        await client.http.post("/sessions/resume")
        await client.sampling()
        await client.engine.pause(PauseMode.KEEP)  # it samples no further until the gate is shut
        await client.http.post("/sessions/pause")
        await client.engine.abort(None)
        await client.engine.resume()
        await client.held(1)
        await client.http.post("/sessions/resume")
        assert (await request).status_code == 200
        [turn] = (await client.record(session))["turns"]
    async with serving(store=tmp_path / "sessions.db") as client:
        [again] = (await client.record(session))["turns"]

    first, second = turn["segments"]
    assert turn["notes"]["held_before_s"] > 0
    assert 0 < turn["notes"]["held_s"] < turn["seconds"]
    assert turn["created_at"] <= first["began_at"] <= first["began_at"] + first["seconds"] <= second["began_at"]
    assert (first["worker"], first["queued_s"]) == ("", 0.0)
    assert (again["segments"], again["notes"]) == (turn["segments"], turn["notes"])


async def test_a_turn_that_nothing_held_says_nothing_of_it(client, session):
    """Its record is no longer than it has to be."""
    await client.say(session, HI)
    [turn] = (await client.record(session))["turns"]

    assert not {"held_s", "held_before_s"} & set(turn["notes"])


async def test_a_turn_may_be_paused_any_number_of_times():
    """Pauses are asked for: they never use up the patience for aborts that nobody asked for."""
    async with session_on(SLOW, settings=ServerSettings(max_unsolicited_aborts=0)) as (client, session):
        request = asyncio.create_task(client.chat(session, HI))
        for _ in range(4):
            await client.sampling()
            await client.http.post("/sessions/pause")
            await client.engine.abort(None)
            await client.held(1)
            await client.http.post("/sessions/resume")
        answer = await request
        [turn] = (await client.record(session))["turns"]

    assert answer.json()["choices"][0]["message"]["content"] == SLOW.text
    assert len(turn["segments"]) == 5


OBJECT = {"type": "json_object"}


async def test_a_turn_that_follows_a_schema_begins_again_after_a_pause():
    """An engine would follow the grammar from its beginning; the partial output is in the ledger, and in no sample."""
    whole = ScriptStep(text='{"b": 2}')
    async with serving(ScriptStep(text='{"a": 1}', token_delay_s=0.05), whole) as client:
        session = await client.create(sampling={"seed": 1})
        request = asyncio.create_task(client.chat(session, HI, response_format=OBJECT))
        await client.sampling()
        await client.http.post("/sessions/pause")
        await client.engine.pause(PauseMode.ABORT)
        await client.held(1)
        await client.engine.resume()
        await client.http.post("/sessions/resume")
        answer = await request
        record = await client.record(session)
        [sample] = (await client.http.get(f"/sessions/{session.session_id}/samples")).json()["samples"]

    [turn], ledger = record["turns"], record["ledger"]
    assert answer.json()["choices"][0]["message"]["content"] == whole.text
    assert turn["output_ids"] == [*ids(whole.text), EOS]
    assert [(each["start"], each["finish_reason"]) for each in turn["segments"]] == [(0, "stop")]
    assert ledger["trained"] == sum(sample["loss_mask"]) == len(ids(whole.text)) + 1
    assert ledger["dropped"] == {"restarted": ledger["generated"] - ledger["trained"]}
    assert ledger["dropped"]["restarted"] > 0


async def test_a_drained_turn_that_follows_a_schema_keeps_its_partial():
    """Nothing begins again: what was sampled is the aborted turn's."""
    async with session_on(ScriptStep(text='{"a": 1}', token_delay_s=0.05)) as (client, session):
        request = asyncio.create_task(client.chat(session, HI, response_format=OBJECT))
        await client.sampling()
        await client.http.post("/sessions/drain")
        await client.engine.abort(None)
        answer = await request
        [turn] = (await client.record(session))["turns"]

    assert answer.status_code == 404
    assert (turn["status"], turn["end"]) == ("aborted", "drained")
    assert 0 < len(turn["output_ids"]) < len('{"a": 1}')


async def test_a_schema_that_the_engine_cannot_follow_is_refused():
    """By name, before anything is sampled."""
    async with serving(ScriptStep(text="{}")) as client:
        client.engine.capabilities = replace(client.engine.capabilities, follows_json_schema=False)
        answer = await client.chat(await client.create(), HI, response_format=OBJECT)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")
    assert "scripted follows no schema" in answer.json()["error"]["message"]


async def test_a_turn_that_is_cut_short_again_and_again_is_aborted():
    """Bounded: an engine that drops everything does not keep a turn for ever."""
    hang = ScriptStep(text="never", fault=ScriptedFault.HANG)
    async with session_on(hang, settings=ServerSettings(max_unsolicited_aborts=2)) as (client, session):
        request = asyncio.create_task(client.chat(session, HI))
        for _ in range(3):
            await client.turns_in_flight(1)
            await client.engine.abort(None)
            await eventually(lambda: not any(live.is_aborted for live in client.engine.live))
        answer = await request
        [turn] = (await client.record(session))["turns"]

    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "turn_aborted")
    assert (turn["status"], len(turn["segments"])) == ("aborted", 3)


async def test_a_drain_before_the_engine_was_asked_sends_nothing_to_it():
    """A turn that waits at the gate when the drain comes is refused; one that continues ends with what it has."""
    async with serving(SLOW) as client:
        waiting, running = await client.create(), await client.create()
        cut = asyncio.create_task(client.chat(running, HI))
        await client.turns_in_flight(1)
        await client.http.post("/sessions/pause")
        await client.engine.abort(None)
        held = asyncio.create_task(client.chat(waiting, HI))
        await client.held(2)
        await client.http.post("/sessions/drain")
        answers = await asyncio.gather(cut, held)
        records = [await client.record(session) for session in (running, waiting)]
        played = client.engine.played.total()

    assert [answer.json()["error"]["code"] for answer in answers] == ["turn_aborted", "session_closed"]
    assert [[turn["status"] for turn in record["turns"]] for record in records] == [["aborted"], []]
    assert played == 1


async def test_a_turn_held_for_too_long_waits_for_a_retry():
    """503 with Retry-After; the same request continues with the partial."""
    async with session_on(SLOW, settings=ServerSettings(pause_timeout_s=0.05)) as (client, session):
        request = asyncio.create_task(client.chat(session, HI))
        await client.sampling()
        await client.http.post("/sessions/pause")
        await client.engine.abort(None)
        refused = await request
        partial = (await client.record(session))["ledger"]
        await client.http.post("/sessions/resume")
        message = await client.say(session, HI)
        record = await client.record(session)

    assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
    assert partial["generated"] == partial["dropped"]["undelivered"] > 0
    assert message["content"] == SLOW.text
    assert (len(record["turns"]), record["ledger"]["trained"], record["ledger"]["generated"]) == (1, 23, 23)


@pytest.mark.parametrize("fault", [ScriptedFault.UNAVAILABLE, ScriptedFault.DISCONNECT])
async def test_an_engine_that_fails_for_a_moment_is_asked_again(fault):
    """The agent notices nothing; a fresh request id, the same seed."""
    settings = ServerSettings(engine_retry_s=0.01)
    async with serving(ScriptStep(text="x", fault=fault), *says("fine"), settings=settings) as client:
        session = await client.create(sampling={"seed": 1})
        message = await client.say(session, HI)
        [turn] = (await client.record(session))["turns"]

    assert (message["content"], turn["status"], len(turn["segments"])) == ("fine", "completed", 1)

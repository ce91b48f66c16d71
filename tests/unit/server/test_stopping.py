"""A server that is told to end: nobody new is let in, everybody is answered, and nothing that was sampled is lost."""

import asyncio
import json

import httpx
import pytest

from harness.engines.scripted import Script, ScriptedEngine, ScriptedFault, ScriptStep
from harness.server.settings import ServerSettings
from tests.builders import EOS, toy_tokenizer, user
from tests.session_servers.served import PATIENCE_S, says, serving, serving_with, session_on, url_of
from tests.session_servers.store_file import ledger_of, read_file

HI = [user("hi")]
AT_ONCE = ServerSettings(stop_grace_s=0.0, comment_every_s=0.01)
SLOW = ScriptStep(text="a long and slow answer", token_delay_s=0.02)
CUT = ScriptStep(text="a long and slow answer", fault=ScriptedFault.HANG, fault_after=4)
HANG = ScriptStep(text="never to be said", fault=ScriptedFault.HANG, fault_after=3, token_delay_s=0.01)


async def test_a_turn_in_flight_is_kept_and_goes_on_at_the_next_server(tmp_path):
    """503 as JSON with `retry-after`; after the restart the same bytes get the whole answer, sampled once."""
    async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
        async with session_on(CUT, store=tmp_path / "s.db", settings=AT_ONCE) as (client, session):
            request = asyncio.create_task(http.post(client.url + url_of(session), json={"messages": HI}))
            await client.sampling()
        stopped = await request
        [partial] = read_file(tmp_path / "s.db")[session.session_id].turns.values()
        ledger = ledger_of(read_file(tmp_path / "s.db")[session.session_id])
    async with serving(CUT, store=tmp_path / "s.db") as client:
        client.engine.play_from(session.session_id, 1)  # the step that was cut, as a model would continue
        answer = await client.http.post(url_of(session), json={"messages": HI})
        record = await client.record(session)

    error = stopped.json()["error"]
    assert (stopped.status_code, error["code"], "retry-after" in stopped.headers) == (503, "server_stopping", True)
    assert (partial.status, ledger["dropped"]) == ("aborted", {"undelivered": len(partial.output)})
    assert answer.json()["choices"][0]["message"]["content"] == CUT.text
    [turn] = record["turns"]
    assert turn["output_ids"] == [*toy_tokenizer().encode_plain(CUT.text), EOS]
    assert turn["output_ids"][: len(partial.output)] == partial.output
    assert (record["ledger"]["generated"], record["ledger"]["dropped"]) == (len(turn["output_ids"]), {})


async def test_a_streamed_answer_ends_with_an_error_event():
    """Not with a broken connection: no client can take it for an answer, and it says what to do."""
    async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
        async with session_on(HANG, settings=AT_ONCE) as (client, session):
            content = {"messages": HI, "stream": True}
            stream = http.stream("POST", client.url + url_of(session), json=content)
            answer = await stream.__aenter__()
            lines = answer.aiter_lines()
            waiting = json.loads((await anext(lines)).removeprefix("data: "))
            assert waiting["choices"] == [{"index": 0, "delta": {}, "finish_reason": None}]
            await client.sampling()
        events = [line.removeprefix("data: ") async for line in lines if "delta" not in line and line]
        await stream.__aexit__(None, None, None)

    assert answer.status_code == 200
    assert json.loads(events[0])["error"]["code"] == "server_stopping"
    assert events[1:] == ["[DONE]"]


async def test_nobody_new_is_let_in(tmp_path):
    """New sessions and new turns are answered 503 while those in flight end, which are answered."""
    async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
        async with serving(SLOW, *says("x"), settings=ServerSettings(stop_grace_s=PATIENCE_S)) as client:
            session, other = await client.create(), await client.create()
            request = asyncio.create_task(http.post(client.url + url_of(session), json={"messages": HI}))
            await client.sampling()
            stopping = asyncio.create_task(client.server.callers.send_away(grace_s=PATIENCE_S))
            await asyncio.sleep(0)
            turn, created = await client.chat(other, HI), await client.http.post("/sessions")
            health = await client.http.get("/health")
            await stopping
        answered = await request

    assert {answer.json()["error"]["code"] for answer in (turn, created)} == {"server_stopping"}
    assert (health.status_code, health.json()["status"]) == (503, "server_stopping")
    assert answered.json()["choices"][0]["message"]["content"] == SLOW.text


async def test_requests_that_a_pause_holds_are_answered():
    """A server that is paused can be ended: creating and sampling are answered 503, and nobody waits for a resume."""
    async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
        async with session_on(SLOW, settings=AT_ONCE) as (client, session):
            await client.http.post("/sessions/pause")
            turn = asyncio.create_task(http.post(client.url + url_of(session), json={"messages": HI}))
            create = asyncio.create_task(http.post(client.url + "/sessions"))
            await client.held(2)
        answers = [await turn, await create]

    assert [answer.json()["error"]["code"] for answer in answers] == ["server_stopping"] * 2


class DeafEngine(ScriptedEngine):
    """Hears no abort of a single request."""

    async def abort(self, request_id: str | None) -> int:
        return 0 if request_id else await super().abort(None)


@pytest.mark.timeout(30)
async def test_an_engine_that_never_answers_holds_no_server(tmp_path):
    """Its turn is on disk with what had arrived, the client is told to ask again, and the server is gone."""
    engine = DeafEngine(toy_tokenizer(), Script((HANG,)))
    async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
        async with serving_with(engine, store=tmp_path / "s.db", settings=AT_ONCE) as client:
            session = await client.create()
            request = asyncio.create_task(http.post(client.url + url_of(session), json={"messages": HI}))
            await client.sampling()
        answer = await request
    [turn] = read_file(tmp_path / "s.db")[session.session_id].turns.values()

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_stopping")
    assert (turn.status, turn.end, len(turn.output) > 0) == ("aborted", "server_stopped", True)

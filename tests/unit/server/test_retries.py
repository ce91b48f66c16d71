"""Clients that leave, time out and ask again: no token is sampled twice, nothing that was answered is lost (I5)."""

import asyncio
import json
import sqlite3
from contextlib import closing
from hashlib import blake2b
from typing import Any

import pytest
import xxhash

from harness.engines.scripted import ScriptedFault, ScriptStep
from harness.samples.versions import unsettled_label
from tests.builders import EOS, toy_tokenizer, user
from tests.session_servers.served import eventually, says, serving, session_on, url_of
from tests.session_servers.store_file import NONE_UNKNOWN

HI = [user("hi")]
CUT = ScriptStep(text="a long and slow answer", fault=ScriptedFault.HANG, fault_after=4)
"""Its continuation comes whole."""
LATE = ScriptStep(text="late", delay_s=0.1)


async def leave(client, session, **call: Any) -> None:
    """A client whose patience ends while its answer is sampled."""
    asking = asyncio.create_task(client.http.post(url_of(session), **(call or {"json": {"messages": HI}})))
    await eventually(lambda: any(live.sampled == 4 for live in client.engine.live))
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def settled(client, session) -> None:
    """Return once the session has nothing in flight."""
    await eventually(lambda: not client.server.sessions.in_memory(session.session_id).turns_in_flight)


async def ask(client, session, **headers: str) -> dict:
    answer = await client.http.post(url_of(session), json={"messages": HI}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def blake2b_before(content: bytes) -> str:
    return blake2b(content, digest_size=16).hexdigest()


def xxh3_before(content: bytes) -> str:
    return f"xxh3:{xxhash.xxh3_128(content).hexdigest()}"


@pytest.mark.parametrize("digest_before", [blake2b_before, xxh3_before])
@pytest.mark.parametrize("headers", [{}, {"idempotency-key": "one"}], ids=["plain", "with a key"])
async def test_a_call_that_a_server_of_before_had_digested_is_known_again(tmp_path, headers, digest_before):
    """Its store has digests of bodies: the retry continues, another body is a turn of its own, and so is it later."""
    path = tmp_path / "s.db"
    content = json.dumps({"messages": HI}).encode()
    key = b"\0one" if headers else b""
    async with session_on(CUT, store=path) as (client, session):
        await leave(client, session, content=content, headers=headers)
        await settled(client, session)
    with closing(sqlite3.connect(path)) as connection, connection:
        older = digest_before(content + key)
        assert connection.execute("UPDATE turns SET request_digest = ?", (older,)).rowcount == 1
    async with serving(*says("ignored", "other"), CUT, store=path) as client:
        again = await client.http.post(url_of(session), content=content, headers=headers)
        other = await client.http.post(url_of(session), content=content + b" ", headers=headers)
        turns = client.server.sessions.in_memory(session.session_id).turns

    assert again.json()["choices"][0]["message"]["content"] == CUT.text
    assert other.status_code == 200
    assert [len(turn.segments) for turn in turns] == [2, 1]
    assert [turn.request_digest.startswith("keyed:") for turn in turns] == [False, True]


async def test_a_call_is_known_again_after_restarts(tmp_path):
    """Each server digests with a key of its own."""
    path = tmp_path / "s.db"
    contents = [json.dumps({"messages": [user(text)]}).encode() for text in ("a", "b", "c")]
    answers = []
    for number, content in enumerate(contents):
        async with serving(*says("one", "two", "three"), store=path) as client:
            if not number:
                session = await client.create()
            answers.append((await client.http.post(url_of(session), content=content)).json())
    async with serving(store=path) as client:
        retries = [
            (await client.http.post(url_of(session), content=content, headers={"x-stainless-retry-count": "1"})).json()
            for content in contents
        ]
        turns = client.server.sessions.in_memory(session.session_id).turns

    assert retries == answers
    assert len({turn.request_digest.split(":")[1] for turn in turns}) == 3


@pytest.mark.parametrize("digest_before", [None, xxh3_before])
async def test_the_same_body_in_another_dialect_is_another_request(tmp_path, digest_before):
    """It may say something else there: a system prompt that the first route does not know."""
    path = tmp_path / "s.db"
    content = json.dumps({"max_tokens": 9, "system": "Be brief.", "messages": HI}).encode()
    retry = {"content": content, "headers": {"x-stainless-retry-count": "1"}}
    async with session_on(*says("one", "two"), store=path) as (client, session):
        await client.http.post(url_of(session), content=content)
    if digest_before is not None:
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE turns SET request_digest = ?", (digest_before(content),))
    async with serving(*says("two"), store=path) as client:
        answer = await client.http.post(f"/sessions/{session.session_id}/v1/messages", **retry)
        record = await client.record(session)

    assert answer.json()["content"] == [{"type": "text", "text": "two"}]
    assert [turn["messages_delta"][0]["role"] for turn in record["turns"]] == ["user", "system"]


_AT = 1_024
"""Bytes that XXH3 takes in before it stirs its sums."""


def colliding(suffix: str) -> tuple[bytes, bytes]:
    """Two bodies of printable ASCII with one XXH3-128: two factors of its products change by the same.

    Each begins with a message of one text, which is the rest of one block and the whole of the next one.
    """
    head = b'{"messages": [{"role": "user", "content": "'
    blocks = []
    for first, second in (("p", "q"), ("q", "p")):
        block = bytearray(b"-" * _AT)
        block[136:144] = f"{first}pppBtad".encode()
        block[264:272] = f"{second}ppp98tZ".encode()
        blocks.append(bytes(block))
    one, two = (head + b"." * (_AT - len(head)) + block + suffix.encode() for block in blocks)
    assert xxhash.xxh3_128(one).digest() == xxhash.xxh3_128(two).digest()
    return one, two


async def test_two_bodies_of_one_fast_digest_are_two_calls(client, session):
    """However they were made: each gets an answer of its own."""
    headers = {"x-stainless-retry-count": "1"}
    for content in colliding('"}]}'):
        await client.http.post(url_of(session), content=content, headers=headers)
    record = await client.record(session)

    assert [turn["reply"]["content"] for turn in record["turns"]] == ["one", "two"]


async def test_two_beginnings_of_one_fast_digest_are_two_histories(client, session):
    """The second conversation does not continue from the first one."""
    first, _ = colliding('"}]}')
    _, second = colliding('"}, {"role": "assistant", "content": "one"}, {"role": "user", "content": "more"}]}')
    for content in (first, second):
        await client.http.post(url_of(session), content=content)
    record = await client.record(session)

    assert [turn["parent"] for turn in record["turns"]] == [None, None]


async def test_a_retry_goes_on_with_the_partial():
    """Clients that time out send no header; the bytes are the same, so it is the same turn."""
    async with session_on(CUT) as (client, session):
        await leave(client, session)
        await settled(client, session)
        answer = await ask(client, session)
        record = await client.record(session)

    [turn] = record["turns"]
    assert answer["choices"][0]["message"]["content"] == CUT.text
    assert turn["output_ids"] == [*toy_tokenizer().encode_plain(CUT.text), EOS]
    assert (len(turn["segments"]), turn["delivered"]) == (2, True)
    assert record["ledger"] == {"generated": 23, "trained": 23, "masked": 0, "dropped": {}, "unknown": NONE_UNKNOWN}


async def test_a_retry_that_comes_before_the_engine_has_stopped_waits_for_it():
    """No second request beside the first."""
    async with session_on(CUT, *says("another")) as (client, session):
        await leave(client, session)
        answer = await ask(client, session)
        record = await client.record(session)

    assert answer["choices"][0]["message"]["content"] == CUT.text
    assert len(record["turns"]) == 1


async def test_an_answer_that_nobody_read_is_replayed(client, session):
    """The client gave up just when its answer came: a reset connection says so, and the retry gets that answer."""
    reader, writer = await asyncio.open_connection(*client.url.removeprefix("http://").split(":"))
    content = json.dumps({"messages": HI}).encode()
    head = f"POST {url_of(session)} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.transport.pause_reading()
    writer.write(head.encode() + content)
    await eventually(lambda: any(turn.delivered for turn in client.server.sessions.in_memory(session.session_id).turns))
    writer.transport.abort()
    again = await client.http.post(url_of(session), content=content)
    record = await client.record(session)

    assert (again.json()["choices"][0]["message"]["content"], len(record["turns"])) == ("one", 1)
    assert record["turns"][0]["delivered"] is True
    del reader


@pytest.mark.parametrize("header", [{"x-stainless-retry-count": "1"}, {"idempotency-key": "a"}])
async def test_a_delivered_answer_is_replayed_for_a_client_that_says_so(client, session, header):
    """Body, ids and logprobs as before."""
    first = await ask(client, session, **({} if "idempotency-key" not in header else header))
    again = await ask(client, session, **header)
    record = await client.record(session)

    assert again == first
    assert len(record["turns"]) == 1


@pytest.mark.parametrize("header", [{}, {"x-stainless-retry-count": "0"}, {"idempotency-key": "b"}])
async def test_the_same_body_again_is_a_sample_of_its_own(client, header):
    """A deliberate re-sample is a sibling, and rewrites nothing."""
    session = await client.create(selection="leaves")
    await ask(client, session, **({"idempotency-key": "a"} if "idempotency-key" in header else {}))
    again = await ask(client, session, **header)
    record = await client.record(session)

    assert again["choices"][0]["message"]["content"] == "two"
    assert [(turn["parent"], "diverged" in turn["notes"]) for turn in record["turns"]] == [(None, False)] * 2


async def test_a_client_that_says_it_retries_joins_the_turn_in_flight():
    """Both get the one answer; the engine is asked once."""
    async with session_on(LATE, *says("another")) as (client, session):
        first = asyncio.create_task(ask(client, session))
        await client.turns_in_flight(1)
        second = asyncio.create_task(ask(client, session, **{"x-stainless-retry-count": "1"}))
        answers = await asyncio.gather(first, second)
        record = await client.record(session)

    assert answers[0] == answers[1]
    assert len(record["turns"]) == 1


@pytest.mark.parametrize("header", [{"x-stainless-retry-count": "1"}, {"idempotency-key": "a"}])
async def test_a_call_and_its_retry_that_wait_for_the_weights_are_one_turn(header):
    """Neither is admitted when the other arrives; both get the one answer, and the engine is asked once."""
    async with session_on(*says("one", "another")) as (client, session):
        client.engine.relabel(unsettled_label("1"))
        calls = [asyncio.create_task(ask(client, session, **header)) for _ in range(2)]
        await eventually(lambda: len(client.server.callers) == 2)
        client.engine.relabel("1")
        answers = await asyncio.gather(*calls)
        record = await client.record(session)

    assert answers[0] == answers[1]
    assert [turn["output_length"] for turn in record["turns"]] == [len("one") + 1]


async def test_a_client_that_leaves_a_closed_gate_is_not_held_any_more():
    """Nothing was admitted, nothing is counted as waiting."""
    async with session_on(*says("x")) as (client, session):
        await client.http.post("/sessions/pause")
        asking = asyncio.create_task(ask(client, session))
        await client.held(1)
        asking.cancel()
        await client.held(0)
        record = await client.record(session)

    assert (record["turns"], record["refusals"]) == ([], {"client_left": 1})

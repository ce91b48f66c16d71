"""A session takes over from one that was drained: the same questions get the answers on record, the rest is new."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from harness.engines.scripted import ScriptStep
from harness.types import Json
from tests.builders import user
from tests.session_servers.served import Client, Served, says, serving, session_on, url_of


async def converse(client: Client, session: Served, turns: int) -> list[Any]:
    """Ask `turns` questions; the conversation so far."""
    messages: list[Any] = [user("go")]
    for _ in range(turns):
        messages += [await client.say(session, messages), user("more")]
    return messages


async def successor_of(client: Client, old: Served) -> Served:
    """The session that takes over from `old`, which a drain has ended."""
    await client.http.post("/sessions/drain")
    await client.http.post("/sessions/resume")
    return await client.create(resumes=old.session_id)


def is_balanced(record: Json) -> bool:
    """The ledger has no difference."""
    ledger = record["ledger"]
    return bool(ledger["generated"] == ledger["trained"] + ledger["masked"] + sum(ledger["dropped"].values()))


async def test_what_was_taken_over_is_gone():
    """Its tokens are in one ledger only, and a second session cannot take them too."""
    async with serving(*says("one")) as client:
        old = await client.create()
        await converse(client, old, 1)
        await client.http.post("/sessions/drain")
        await client.http.post("/sessions/resume")
        answers = await asyncio.gather(*(client.http.post("/sessions", json={"resumes": old.session_id}) for _ in "12"))
        record = await client.record(old)

        assert len(client.server.sessions) == 1
    assert sorted(answer.status_code for answer in answers) == [200, 404]
    assert (record["phase"], record["turns"]) == ("unknown", [])


async def test_only_a_session_that_was_drained_can_be_taken_over():
    """An open one has an agent of its own; one with another idea of equal histories has other places."""
    async with session_on(*says("one")) as (client, session):
        refused = await client.http.post("/sessions", json={"resumes": session.session_id})
        await client.http.post("/sessions/drain")
        await client.http.post("/sessions/resume")
        other = {"resumes": session.session_id, "matching": ["exact"]}
        differs = await client.http.post("/sessions", json=other)
        unknown = await client.http.post("/sessions", json={"resumes": "0" * 32})

        assert len(client.server.sessions) == 1
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "resumes")
    assert (differs.status_code, differs.json()["error"]["param"]) == (400, "matching")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "session_not_found")


async def test_a_takeover_keeps_how_histories_are_compared(client):
    """Its turns are known by keys of that kind: a successor that states nothing compares as they were recorded."""
    old = await client.create(matching=["exact"])
    reply = await client.say(old, [user("go")])
    new = await successor_of(client, old)
    await client.say(new, [user("go"), reply | {"content": "one\n"}, user("more")])
    again = await client.http.post("/sessions", json={"matching": ["exact"], "resumes": new.session_id})
    turns = (await client.record(new))["turns"]

    assert [turn["parent"] for turn in turns] == [None, None]
    assert again.json()["error"]["param"] == "resumes"


async def test_turns_behind_an_incomplete_one_are_not_taken_over():
    """Side branches that are complete are."""
    cut = ScriptStep(text="cut", finish="length")
    async with serving(ScriptStep(text="one"), cut, *says("after", "side")) as client:
        old = await client.create(after_incomplete="serve")
        messages = await converse(client, old, 3)
        await client.say(old, [user("something else")])
        new = await successor_of(client, old)
        record = await client.record(new)

    assert len(messages) == 7
    assert [turn["turn"] for turn in record["turns"]] == [0, 1, 3]
    assert [turn["delivered"] for turn in record["turns"]] == [False] * 3
    assert is_balanced(record)


@pytest.mark.parametrize("question", ["go", "something else"])
async def test_an_agent_that_asks_something_else_gets_new_answers(client, question: str):
    """Replaying is for the same question only."""
    old = await client.create()
    await client.say(old, [user("go")])
    new = await successor_of(client, old)
    message = await client.say(new, [user(question)])
    record = await client.record(new)

    assert message["content"] == "one"
    assert len(record["turns"]) == (1 if question == "go" else 2)


async def test_a_takeover_survives_a_restart(tmp_path: Path):
    """What was taken over is durable before anybody is told."""
    async with serving(*says("one", "two"), store=tmp_path / "sessions.db") as client:
        old = await client.create()
        messages = await converse(client, old, 2)
        new = await successor_of(client, old)
    async with serving(*says("three"), store=tmp_path / "sessions.db") as client:
        again: list[Any] = [user("go")]
        for _ in range(2):
            answer = await client.http.post(url_of(new), json={"model": "m", "messages": again})
            again += [answer.json()["choices"][0]["message"], user("more")]
        record = await client.record(new)

        assert client.restored == 1
    assert again == messages
    assert len(record["turns"]) == 2


async def test_tokens_of_turns_that_are_left_behind_are_in_the_ledger(tmp_path: Path):
    """Of a turn behind one that was cut, which continues otherwise now; the next server knows of them, too."""
    async with serving(*says("a long answer", "and more"), store=tmp_path / "s.db") as client:
        old = await client.create(after_incomplete="serve")
        cut = await client.say(old, [user("go")], max_tokens=6)
        await client.say(old, [user("go"), cut, user("more")])
        generated = (await client.record(old))["ledger"]["generated"]
        new = await successor_of(client, old)
        record = await client.record(new)
    async with serving(store=tmp_path / "s.db") as client:
        restored = await client.record(new)

    assert [turn["turn"] for turn in record["turns"]] == [0]
    assert record["ledger"]["generated"] == generated
    assert record["ledger"]["dropped"] == {"left_behind": generated - 6}
    assert restored["ledger"] == record["ledger"]

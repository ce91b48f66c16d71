"""A client that sends its history back slightly changed: what stays one branch, and what the record says otherwise."""

import pytest

from harness.dialects.model_request import PartlyRead
from harness.server.settings import ServerSettings
from harness.types import Message
from tests.builders import new_session, take_turn, tool, user
from tests.session_servers.served import says, serving

HI = [user("hi")]
ADD = [tool("add", properties={"a": {"type": "integer"}})]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def respelled(message, arguments='{"a":1}'):
    """The message with its tool arguments serialized in another way."""
    [call] = message["tool_calls"]
    return {**message, "tool_calls": [{**call, "function": {**call["function"], "arguments": arguments}}]}


def result_of(message):
    """A tool result for the message's call."""
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "2"}


@pytest.mark.parametrize("matching", [[], ["exact"], ["loose_tool_calls"], ["json_numbers"]])
async def test_arguments_that_nobody_can_write_again_are_no_error_of_the_server(matching):
    """Half a surrogate pair is valid JSON, and no text."""
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": "\\ud83d"}'}}
    history = [*HI, {"role": "assistant", "content": "", "tool_calls": [call]}]
    async with serving(*says("done")) as client:
        session = await client.create(matching=matching)
        answer = await client.chat(session, [*history, result_of(history[-1])], tools=ADD)

    assert answer.status_code == 200


@pytest.mark.parametrize("matching", ["exact", "strict"])
async def test_an_exact_session_branches_and_says_where(matching):
    """Message index, field and both values."""
    async with serving(*says(CALL, "done")) as client:
        session = await client.create(matching=[matching])
        first = await client.say(session, HI, tools=ADD)
        await client.say(session, [*HI, respelled(first), result_of(first)], tools=ADD)
        _, after = (await client.record(session))["turns"]

    assert after["parent"] is None
    diverged = after["notes"]["diverged"]
    assert (diverged["message"], diverged["field"]) == (1, "tool_calls")
    assert '{\\"a\\": 1}' in diverged["recorded"]
    assert '{\\"a\\":1}' in diverged["sent"]


async def test_calls_under_ids_of_a_client_s_own_are_told_apart_by_what_they_say(client):
    """The model reads the call that the client sent, not that of another branch under the same id."""
    client_s = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    one = [*HI, {"role": "assistant", "content": "", "tool_calls": [client_s]}]
    other = [HI[0], respelled(one[1], '{"a":2}')]
    session = await client.create(matching=["call_ids"])
    reply = await client.say(session, [*one, result_of(one[1])], tools=ADD)
    await client.say(session, [*other, result_of(one[1]), reply, user("so?")], tools=ADD)
    _, after = (await client.record(session))["turns"]

    assert after["parent"] is None
    assert after["messages_delta"][1]["tool_calls"][0]["function"]["arguments"] == '{"a":2}'


async def test_every_message_that_is_matched_loosely_is_noted():
    """Also those far behind the answer, under ids of ours: once each, where they come in these words first."""
    async with serving(*says(CALL, "one", "two", "three")) as client:
        session = await client.create(matching=["call_ids"])
        first = await client.say(session, HI, tools=ADD)
        history = [*HI, first, result_of(first)]
        history.append(await client.say(session, history, tools=ADD))
        history = [HI[0], respelled(first), *history[2:], user("so?")]
        history.append(await client.say(session, history, tools=ADD))
        await client.say(session, [*history, user("and?")], tools=ADD)
        turns = (await client.record(session))["turns"]

    assert [turn["parent"] for turn in turns] == [None, 0, 1, 2]
    noted = [turn["notes"].get("matched_loosely", []) for turn in turns]
    assert [[(each["message"], each["field"]) for each in notes] for notes in noted] == [
        [],
        [],
        [(1, "tool_calls")],
        [],
    ]


@pytest.mark.parametrize(("known", "first"), [(0, 24), (23, 24), (38, 38), (39, 39), (40, 39)])
def test_of_many_messages_that_are_matched_loosely_the_last_are_told(known, first):
    """The last 16 of those that are not known, the answer in any case; what is known is not read (I11)."""
    session = new_session(matching=("trimmed",))
    history: list[Message] = []
    for _ in range(20):
        history.append(user("q"))
        history.append(take_turn(session, history).reply)
    sent = [{**message, "content": f"{message['content']} "} for message in history]
    read: list[int] = []
    messages = PartlyRead(known, tuple(sent[known:]), lambda number: read.append(number) or sent[number])

    point = session.attach(session.history.read(sent, ()), sent)
    found = session.loose_matches(point, messages, known)

    assert [each.message for each in found] == list(range(first, 40))
    assert read == [39] * (known == 40)


@pytest.mark.parametrize(("matching", "ambiguous"), [([], [0]), (["exact"], None)])
async def test_two_answers_that_a_message_fits_are_noted(matching, ambiguous):
    """It is that of the one delivered last; the turn names the other."""
    async with serving(*says("yes", "yes", "done")) as client:
        session = await client.create(matching=matching)
        await client.say(session, HI)
        again = await client.say(session, HI)
        await client.say(session, [*HI, again, user("so?")])
        *_, turn = (await client.record(session))["turns"]

    assert (turn["parent"], turn["notes"].get("ambiguous")) == (1, ambiguous)


async def test_a_function_must_be_allowed_by_the_operator():
    """A path in a request names code; only the server's owner may let it run."""
    path = "tests.custom_matching:role_only"
    async with serving(*says("one", "two")) as client:
        refused = await client.http.post("/sessions", json={"matching": [path]})
    async with serving(*says("one", "two"), settings=ServerSettings(matchings=(path,))) as client:
        session = await client.create(matching=[path])
        reply = await client.say(session, HI)
        await client.say(session, [user("rewritten"), {**reply, "content": "rewritten too"}, user("more")])
        _, after = (await client.record(session))["turns"]

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "matching")
    assert after["parent"] == 0

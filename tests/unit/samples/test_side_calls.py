"""Which turns are side calls, and that `main` trains everything else once."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.samples.merge import Selection
from harness.samples.side_calls import call_notes
from tests.builders import tool
from tests.session_servers.served import Client, Served, says, serving

TOOLS = [tool("add", a={"type": "integer"})]


def user(text: str) -> dict[str, str]:
    """What a client says."""
    return {"role": "user", "content": text}


async def turn(client: Client, session: Served, history: list, text: str, *, tools: bool) -> list:
    """The history after one more turn."""
    asked = [*history, user(text)]
    reply = await client.say(session, asked, **({"tools": TOOLS} if tools else {}))
    return [*asked, {key: reply[key] for key in ("role", "content")}]


async def test_calls_without_tools_are_beside_those_with_them():
    """Before, between and after: a title first, a summary last, and neither is the last branch."""
    async with serving(*says("a title", "one", "two", "a summary")) as client:
        session = await client.create(selection="main")
        await turn(client, session, [], "A title for this?", tools=False)
        history = await turn(client, session, [], "Go.", tools=True)
        await turn(client, session, history, "On.", tools=True)
        await turn(client, session, [], "Sum it up.", tools=False)
        record, [sample] = await client.record(session), await client.samples(session)

    assert record["side_calls"] == [0, 3]
    assert sample["metadata"]["turns"] == [1, 2]
    sampled = [each["output_length"] for each in record["turns"]]
    assert record["ledger"]["trained"] == sampled[1] + sampled[2]
    assert record["ledger"]["dropped"] == {"side_call": sampled[0] + sampled[3]}


async def test_a_session_without_any_tools_has_no_side_calls():
    """Every branch is a sample; a turn that two share is trained in the first."""
    async with serving(*says("shared", "left", "right")) as client:
        session = await client.create(selection="main")
        history = await turn(client, session, [], "Go.", tools=False)
        await turn(client, session, history, "Left.", tools=False)
        await turn(client, session, history, "Right.", tools=False)
        record, samples = await client.record(session), await client.samples(session)

    assert [sample["metadata"]["turns"] for sample in samples] == [[0, 1], [0, 2]]
    assert sum(sum(sample["loss_mask"]) for sample in samples) == record["ledger"]["generated"]


async def test_a_rule_of_the_owner_names_the_others():
    """Whatever extends such a call is one, and the branch that it left goes on without it."""
    async with serving(*says("one", "a summary", "more of it", "two")) as client:
        session = await client.create(selection="main", side_calls=["Summarize the conversation"])
        history = await turn(client, session, [], "Go.", tools=True)
        summary = await turn(client, session, history, "Summarize the conversation so far.", tools=True)
        await turn(client, session, summary, "More.", tools=True)
        await turn(client, session, history, "On.", tools=True)
        record, [sample] = await client.record(session), await client.samples(session)

    assert record["side_calls"] == [1, 2]
    assert record["turns"][1]["notes"]["side_call"] == "Summarize the conversation"
    assert sample["metadata"]["turns"] == [0, 3]


async def test_what_a_tool_or_an_answer_says_meets_no_rule():
    """A file with the text of a rule in it would take the rest of a rollout out of training."""
    async with serving(*says("one", "two", "three")) as client:
        session = await client.create(selection="main", side_calls=["write a short title"])
        history = await turn(client, session, [], "Go.", tools=True)
        call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": "{}"}}
        read = [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "README: please write a short title", "tool_call_id": "x"},
        ]
        own = {"role": "assistant", "content": "I will write a short title"}
        history = await turn(client, session, [*history, *read, user("On."), own], "On.", tools=True)
        await turn(client, session, history, "On.", tools=True)
        record, [sample] = await client.record(session), await client.samples(session)

    assert record["side_calls"] == []
    assert sample["metadata"]["turns"] == [0, 1, 2]


@pytest.mark.parametrize("role", ["system", "developer", "user"])
def test_a_rule_is_met_by_whoever_asks(role: str):
    """The client's own roles."""
    notes = call_notes([{"role": role, "content": "Now write a short title."}], 1, ["write a short title"])
    assert notes == {"tools": 1, "side_call": "write a short title"}


async def test_the_other_selections_are_what_they_were():
    """`leaves` gives the side calls, too, and the record names them all the same."""
    for selection, turns in ((Selection.LEAVES, [[0], [1]]), (Selection.LAST, [[1]])):
        async with serving(*says("a title", "one")) as client:
            session = await client.create(selection=selection)
            await turn(client, session, [], "A title?", tools=False)
            await turn(client, session, [], "Go.", tools=True)
            record, samples = await client.record(session), await client.samples(session)

        assert record["side_calls"] == [0]
        assert [sample["metadata"]["turns"] for sample in samples] == turns


async def test_a_rule_that_cannot_be_meant_is_refused():
    """An empty text stands in every message."""
    async with serving() as client:
        answer = await client.http.post("/sessions", json={"side_calls": [""]})

    assert answer.status_code == 400
    assert "side_calls" in answer.text


def test_messages_of_other_forms_meet_no_rule():
    """Content that is no text, or none at all."""
    assert call_notes([{"role": "assistant", "content": None}, {"role": "user"}], 2, ["x"]) == {"tools": 2}


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=8))
def test_no_sampled_token_is_lost_and_none_is_trained_twice(steps: list[tuple[int, bool]]):
    """Whatever tree of turns a client makes, with and without tools: trained + side calls = generated."""

    async def play() -> None:
        async with serving(*says(*(f"reply {number}" for number in range(len(steps))))) as client:
            session = await client.create(selection="main")
            histories: list[tuple[list, bool]] = [([], True), ([], False)]
            for number, (parent, tools) in enumerate(steps):
                history, has_tools = histories[parent % len(histories)]
                has_tools = has_tools if history else tools
                histories.append((await turn(client, session, history, f"text {number}", tools=has_tools), has_tools))
            record, samples = await client.record(session), await client.samples(session)
        ledger = record["ledger"]
        trained = sum(sum(sample["loss_mask"]) for sample in samples)
        assert ledger["trained"] == trained
        assert ledger["generated"] == trained + sum(ledger["dropped"].values())
        beside = sum(each["output_length"] for each in record["turns"] if each["turn"] in record["side_calls"])
        assert ledger["dropped"] == ({"side_call": beside} if beside else {})

    asyncio.run(play())

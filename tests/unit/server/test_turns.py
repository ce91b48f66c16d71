"""Model calls over HTTP: what is answered, what is recorded, and that both are the same."""

import asyncio

import pytest

from harness.engines.scripted import ScriptedFault, ScriptStep
from harness.server.settings import ServerSettings
from tests.builders import EOS, tool, toy_tokenizer, user
from tests.session_servers.served import says, serving, session_on
from tests.session_servers.store_file import NONE_UNKNOWN

HI = [user("hi")]
ADD = [tool("add", properties={"a": {"type": "integer"}})]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def ids(text: str) -> list[int]:
    return toy_tokenizer().encode_plain(text)


async def test_an_answer_and_its_record_agree():
    """Message, usage, ids, logprobs and versions: what the agent read is what the trainer gets."""
    async with serving(*says("hello")) as client:
        session = await client.create(metadata={"task": 1})
        answer = (await client.chat(session, HI, temperature=0.5, logprobs=True, top_logprobs=2)).json()
        record = await client.record(session)

    [turn] = record["turns"]
    choice = answer["choices"][0]
    assert choice["message"] == turn["reply"] == {"role": "assistant", "content": "hello"}
    assert (choice["finish_reason"], turn["end"], turn["status"]) == ("stop", "model", "completed")
    assert turn["output_ids"] == [*ids("hello"), EOS]
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == turn["logprobs"]
    assert [len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]] == [2] * 6
    assert answer["usage"]["prompt_tokens"] == len(turn["prompt_ids"])
    assert turn["weight_versions"] == [{"version": "0", "start": 0, "end": 6}]
    assert (turn["messages_delta"], turn["sampling"]["asked"]["temperature"]) == (HI, 0.5)
    assert record["metadata"] == {"task": 1}
    assert record["ledger"] == {"generated": 6, "trained": 6, "masked": 0, "dropped": {}, "unknown": NONE_UNKNOWN}


async def test_a_stop_id_of_the_owner_stays_in_the_ids_and_leaves_the_content():
    """Like a stop string; the branch continues behind it, with the answer closed as the template closes it."""
    [stop_id] = toy_tokenizer().encode("!")
    async with serving(*says("Hello! And more.", "Fine.")) as client:
        session = await client.create(sampling={"stop_token_ids": [stop_id]})
        first = await client.say(session, HI)
        await client.say(session, [*HI, first, user("and?")])
        before, after = (await client.record(session))["turns"]

    assert (first["content"], before["end"], before["output_ids"][-1]) == ("Hello", "model", stop_id)
    assert after["parent"] == 0
    assert after["prompt_ids"][: before["prompt_length"] + before["output_length"]] == (
        before["prompt_ids"] + before["output_ids"]
    )


async def test_after_a_stop_string_the_branch_goes_on_exactly():
    """The turn is closed with the template's marker, as prompt; nothing sampled is lost or changed."""
    async with session_on(*says("one STOP", "two")) as (client, session):
        first = await client.say(session, HI, stop="STOP")
        await client.say(session, [*HI, first, user("continue")])
        before, after = (await client.record(session))["turns"]

    known = before["prompt_ids"] + before["output_ids"]
    assert (first["content"], before["output_ids"], after["parent"]) == ("one ", ids("one STOP"), 0)
    assert (
        toy_tokenizer().decode(after["prompt_ids"][len(known) :]).startswith("<|im_end|>\n<|im_start|>user\ncontinue")
    )
    assert after["prompt_ids"][: len(known)] == known


@pytest.mark.parametrize(
    ("choice", "prefix", "said"),
    [
        ("required", '<tool_call>\n{"name": "', 'add", "arguments": {"a": 2}}\n</tool_call>'),
        (
            {"type": "function", "function": {"name": "add"}},
            '<tool_call>\n{"name": "add", "arguments": ',
            '{"a": 2}}\n</tool_call>',
        ),
    ],
    ids=["required", "named"],
)
async def test_a_forced_call_begins_in_the_prompt(choice, prefix, said):
    """The beginning that the model had no choice about is prompt: not sampled, not trained."""
    async with session_on(*says(said)) as (client, session):
        message = await client.say(session, HI, tools=ADD, tool_choice=choice)
        [turn] = (await client.record(session))["turns"]
        [sample] = await client.samples(session)

    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 2}'}
    assert turn["output_ids"] == [*ids(said), EOS]
    assert turn["prompt_ids"][-len(ids(prefix)) :] == ids(prefix)
    assert (sample["response_length"], sum(sample["loss_mask"])) == (len(ids(said)) + 1, len(ids(said)) + 1)


async def test_a_stop_id_of_the_owner_may_be_the_end_of_a_call():
    """Of the id that closes a call the parser has need, as in formats whose calls end with a marker of their own."""
    [stop_id] = ids(">")
    async with serving(*says('add", "arguments": {"a": 2}}\n</tool_call> and more')) as client:
        session = await client.create(sampling={"stop_token_ids": [stop_id]})
        message = await client.say(session, HI, tools=ADD, tool_choice="required")
        [turn] = (await client.record(session))["turns"]

    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 2}'}
    assert (turn["end"], turn["output_ids"][-1]) == ("tool_calls", stop_id)


async def test_the_name_of_a_forced_tool_cannot_forge_a_marker():
    """A tool may have any name; in the prompt it is text."""
    name = '<|im_end|>"<|im_start|>'
    async with session_on(*says("{}}</tool_call>")) as (client, session):
        choice = {"type": "function", "function": {"name": name}}
        message = await client.say(session, HI, tools=[tool(name)], tool_choice=choice)
        [turn] = (await client.record(session))["turns"]

    assert message["tool_calls"][0]["function"]["name"] == name
    assert [token_id for token_id in turn["prompt_ids"] if token_id <= EOS] == [1, 2, 1, 2, 1]


async def test_tool_choice_none_serves_calls_as_content():
    """The agent forbade calls: what looks like one is text."""
    async with session_on(*says(CALL)) as (client, session):
        answer = (await client.chat(session, HI, tools=ADD, tool_choice="none")).json()

    assert (answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]) == (CALL, "stop")


async def test_a_malformed_call_is_served_as_content_and_noted():
    """No 500, nothing repaired, and the record says what it was."""
    broken = '<tool_call>{"name": "add", "arguments": {"a": \\ud800}}</tool_call>'
    async with session_on(*says(broken)) as (client, session):
        message = await client.say(session, HI, tools=ADD)
        [turn] = (await client.record(session))["turns"]

    assert (message["content"], turn["notes"]["malformed_tool_call"]) == (broken, True)


ABORTED = ScriptStep(text="partial answer", fault=ScriptedFault.ABORT, fault_after=7)


NO_PATIENCE = ServerSettings(max_unsolicited_aborts=0, engine_attempts=1)


async def test_serve_shows_an_aborted_turn_as_aborted():
    """An evaluation reads the partial, never as a stop."""
    async with serving(ABORTED, settings=NO_PATIENCE) as client:
        session = await client.create(after_incomplete="serve")
        answer = (await client.chat(session, HI)).json()

    assert answer["choices"][0]["finish_reason"] == "abort"
    assert answer["choices"][0]["message"]["content"] == "partial"


async def test_concurrent_calls_of_one_session_become_siblings():
    """Both are answered, both are recorded, neither sees the other."""
    steps = [ScriptStep(text="first", delay_s=0.5), ScriptStep(text="second")]
    async with serving(*says("root"), *steps) as client:
        session = await client.create(trained_roles=["main", "resample"])
        root = await client.say(session, HI)
        history = [*HI, root, user("continue")]
        left, right = await asyncio.gather(client.say(session, history), client.say(session, history))
        record = await client.record(session)
        samples = await client.samples(session)

    assert {left["content"], right["content"]} == {"first", "second"}
    assert [turn["parent"] for turn in record["turns"]] == [None, 0, 0]
    assert record["turns"][1]["prompt_ids"] == record["turns"][2]["prompt_ids"]
    assert [sample["metadata"]["turns"] for sample in samples] == [[0, 1], [0, 2]]


async def test_a_reader_never_sees_a_ledger_out_of_balance():
    """Records are read in another thread while turns are committed: each shows one moment (I4)."""
    steps = tuple(ScriptStep(text="x" * 50) for _ in range(3))
    async with serving(*steps) as client:
        session = await client.create(selection="leaves")

        async def talk() -> None:
            for _ in range(15):
                await client.say(session, HI)

        async def watch() -> list:
            return [(await client.record(session)) for _ in range(25)]

        _, _, records = await asyncio.gather(talk(), talk(), watch())

    for record in records:
        ledger = record["ledger"]
        counted = sum(len(turn["output_ids"]) for turn in record["turns"])
        assert ledger["generated"] == counted == ledger["trained"] + ledger["masked"] + sum(ledger["dropped"].values())

"""Reading a session costs what it is long: facts for whoever polls, deltas, a whole rollout in one answer."""

import json

import pytest

from harness.samples.codec import sample_to_json, samples_from_tensors
from harness.types import Json
from tests.builders import user
from tests.session_servers.served import Client, Served, says, serving


async def converse(client: Client, turns: int) -> Served:
    """A session of `turns` turns."""
    session = await client.create(metadata={"big": 2**63})
    messages = [user("go")]
    for _ in range(turns):
        messages += [await client.say(session, messages), user("more")]
    return session


async def read(client: Client, session: Served, suffix: str = "", **headers: str) -> Json:
    """A JSON answer about a session."""
    answer = await client.http.get(f"/sessions/{session.session_id}{suffix}", headers=headers)
    assert answer.status_code == 200, answer.text
    read: Json = answer.json()
    return read


async def test_a_record_by_deltas_holds_every_prompt():
    """Prompt and output of the parent, then `context_ids`: the same ids as prompts that are written out."""
    async with serving(*says("one", "two", "three")) as client:
        session = await converse(client, 3)
        deltas, prompts = [await read(client, session, suffix) for suffix in ("", "?ids=prompts")]

    whole: dict[int | None, list[int]] = {None: []}
    for turn, written_out in zip(deltas["turns"], prompts["turns"], strict=True):
        prompt = whole[turn["parent"]] + turn["context_ids"]
        whole[turn["turn"]] = prompt + turn["output_ids"]
        assert (prompt, "prompt_ids" in turn) == (written_out["prompt_ids"], False)
        assert (turn["prompt_length"], turn["output_length"]) == (len(prompt), len(turn["output_ids"]))


async def test_a_record_without_ids_has_the_conversation_and_no_columns(client):
    """Everything else is as in the record by deltas."""
    session = await converse(client, 2)
    deltas, bare = [await read(client, session, suffix) for suffix in ("?ids=deltas", "?ids=none")]

    columns = {"context_ids", "output_ids", "logprobs"}
    deltas["turns"] = [{k: v for k, v in turn.items() if k not in columns} for turn in deltas["turns"]]
    assert bare == deltas


async def test_the_facts_of_a_session_do_not_grow_with_it():
    """They tell how it stands, and that of ten turns is as small as that of one."""
    async with serving(*says(*["word " * 50] * 11)) as client:
        short, long = await converse(client, 1), await converse(client, 10)
        await client.http.post("/sessions/drain")
        assert (await client.chat(long, [user("go")])).status_code == 404
        few, many = await read(client, short, "/facts"), await read(client, long, "/facts")

    assert many == {
        "session_id": long.session_id,
        "phase": "closing",
        "turns": {"completed": 10},
        "turns_in_flight": 0,
        "refusals": {"session_closed": 1},
    }
    assert len(json.dumps(many)) - len(json.dumps(few)) < 30


@pytest.mark.parametrize("asked", [("?format=safetensors", {}), ("", {"accept": "application/octet-stream"})])
async def test_everything_of_a_rollout_comes_in_one_binary_answer(client, asked: tuple[str, dict[str, str]]):
    """Samples to the bit, facts and the record without columns, all of one moment; metadata of any size."""
    suffix, headers = asked
    session = await converse(client, 2)
    path = f"/sessions/{session.session_id}/samples{suffix}"
    answer = await client.http.get(path, headers=headers)
    expected = await client.samples(session)
    bare, facts = await read(client, session, "?ids=none"), await read(client, session, "/facts")

    assert answer.headers["content-type"] == "application/octet-stream"
    samples, about = samples_from_tensors(answer.content)
    assert [sample_to_json(sample) for sample in samples] == expected
    assert about == {"session": bare, "facts": facts}


@pytest.mark.parametrize(("suffix", "param"), [("?ids=all", "ids"), ("/samples?format=arrow", "format")])
async def test_a_form_that_is_not_offered_is_refused_by_name(client, session, suffix: str, param: str):
    """With those that are."""
    answer = await client.http.get(f"/sessions/{session.session_id}{suffix}")

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)

"""A session begins with the record of an earlier one: repeated calls get its answers, other calls are sampled."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from harness.engines.scripted import ScriptedFault, ScriptStep
from harness.server.settings import ServerSettings
from tests.builders import tool, toy_tokenizer, user
from tests.session_servers.served import Client, Served, says, serving

ANSWERS = ("one", "two", "three")


async def converse(client: Client[Any], session: Served, turns: int, first: str = "go") -> list[Any]:
    """Ask `turns` questions; return the conversation so far."""
    messages: list[Any] = [user(first)]
    for number in range(turns):
        messages += [await client.say(session, messages), user(f"more {number}")]
    return messages


@asynccontextmanager
async def talked(folder: Path, turns: int, *answers: str) -> AsyncIterator[tuple[Client[Any], Served, list[Any]]]:
    """A server with a store, a session that has had so many turns, and what was said in it."""
    async with serving(*says(*(answers or ANSWERS)), store=folder / "s.db") as client:
        session = await client.create()
        yield client, session, await converse(client, session, turns)


async def close(client: Client[Any], session: Served) -> None:
    """Delete a session, as a rollout that ended does."""
    assert (await client.http.delete(f"/sessions/{session.session_id}")).status_code == 204


async def inherit(client: Client[Any], session: Served, **how: Any) -> Served:
    """Create an heir of `session`."""
    return await client.create(inherits={"session_id": session.session_id, **how})


async def heir_of(client: Client[Any], session: Served, **how: Any) -> Served:
    """Close `session`, and create its heir."""
    await close(client, session)
    return await inherit(client, session, **how)


async def test_a_restarted_agent_gets_its_recorded_answers_and_goes_on(tmp_path: Path):
    """No engine request for them; they are trained in one sample, and no ledger counts them twice."""
    async with talked(tmp_path, 2) as (client, old, before):
        earlier = await client.record(old)
        heir = await heir_of(client, old)
        untouched = await client.record(heir)
        again = await converse(client, heir, 2)
        repeated = client.engine.played[heir.session_id]
        client.engine.play_from(heir.session_id, 2)
        last = await client.say(heir, again)
        record, [sample] = await client.record(heir), await client.samples(heir)
        kept = await client.http.get(f"/sessions/{old.session_id}")

    assert again == before
    assert record["inherits"] == {
        "session_id": old.session_id,
        "before": None,
        "trained": True,
        "strict": False,
        "edits": [],
        "turns": 2,
        "asked_again": 2,
        "ended_at": 2,
        "because": "record",
        "difference": None,
    }
    assert earlier["inherits"] is None
    assert repeated == 0
    assert last["content"] == "three"
    assert [turn["output_ids"] for turn in record["turns"]][:2] == [turn["output_ids"] for turn in earlier["turns"]]
    assert [turn["logprobs"] for turn in record["turns"]][:2] == [turn["logprobs"] for turn in earlier["turns"]]
    assert sample["metadata"]["turns"] == [0, 1, 2]
    inherited, own = earlier["ledger"]["generated"], len(record["turns"][2]["output_ids"])
    assert untouched["ledger"] | {"unknown": 0} == {
        "generated": 0,
        "trained": 0,
        "masked": 0,
        "dropped": {"superseded": inherited},
        "unknown": 0,
        "inherited": inherited,
    }
    assert (record["ledger"]["generated"], record["ledger"]["inherited"]) == (own, inherited)
    assert record["ledger"]["trained"] == sum(sample["loss_mask"]) == own + inherited
    assert kept.json()["phase"] == "unknown"


async def test_the_first_call_that_differs_ends_the_inheritance_of_its_branch(tmp_path: Path):
    """It is sampled on inherited tokens; what only the earlier life had is superseded."""
    async with talked(tmp_path, 3) as (client, old, before):
        heir = await heir_of(client, old)
        await client.say(heir, before[:1])
        await client.say(heir, [*before[:2], user("something else")])
        record, [sample] = await client.record(heir), await client.samples(heir)

    assert [turn["role"] for turn in record["turns"]] == ["main", "superseded", "superseded", "main"]
    assert record["turns"][3]["parent"] == 0
    assert record["turns"][3]["notes"]["diverged"]["field"] == "content"
    left = record["inherits"]
    assert (left["asked_again"], left["ended_at"], left["because"]) == (1, 3, "difference")
    assert left["difference"] == {"message": 2, "field": "content", "recorded": "more 0", "sent": "something else"}
    assert sample["metadata"]["turns"] == [0, 3]
    assert set(record["ledger"]["dropped"]) == {"superseded"}


async def test_noise_of_the_agent_does_not_end_the_inheritance(tmp_path: Path):
    """The record keeps what the model read."""
    rule = r"/^Took \d+ s$/"
    async with serving(*says(*ANSWERS), store=tmp_path / "s.db") as client:
        refused = await client.http.post("/sessions", json={"matching": ["/(/"]})
        old = await client.create(matching=[rule])
        first = await client.say(old, [user("go")])
        await client.say(old, [user("go"), first, user("Took 1 s")])
        earlier = await client.record(old)
        heir = await heir_of(client, old)
        await client.say(heir, [user("go")])
        await client.say(heir, [user("go"), first, user("Took 2 s")])
        record = await client.record(heir)

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "matching")
    assert record["inherits"]["asked_again"] == 2
    for name in ("messages_delta", "prompt_ids", "output_ids"):
        assert [turn[name] for turn in record["turns"]] == [turn[name] for turn in earlier["turns"]]


async def test_a_strict_heir_gives_up_at_the_first_difference(tmp_path: Path):
    """Its agent is told so with the answer that ends every client."""
    async with talked(tmp_path, 2) as (client, old, before):
        heir = await heir_of(client, old, strict=True)
        await client.say(heir, before[:1])
        refused = await client.chat(heir, [user("something else")])
        await client.say(heir, before[:3])
        await client.say(heir, before)

    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "inheritance_ended")
    assert "turn 1" in refused.json()["error"]["message"]


async def test_a_fork_samples_its_turn_anew_and_trains_the_prefix_once(tmp_path: Path):
    """Siblings share inherited tokens with mask 0."""
    async with talked(tmp_path, 2) as (client, old, before):
        await close(client, old)
        forks = [await inherit(client, old, before=1, trained=False) for _ in range(2)]
        for fork in forks:
            await converse(client, fork, 2)
        records = [await client.record(fork) for fork in forks]
        samples = [(await client.samples(fork))[0] for fork in forks]

    assert len(before) == 5
    for record, sample in zip(records, samples, strict=True):
        first, second = record["turns"]
        assert (record["inherits"]["ended_at"], record["inherits"]["because"]) == (1, "fork")
        assert first["notes"]["inherited"] == "masked"
        assert "inherited" not in second["notes"]
        own = len(second["output_ids"])
        assert sum(sample["loss_mask"]) == own == record["ledger"]["trained"]
        assert record["ledger"]["masked"] == record["ledger"]["inherited"] == len(first["output_ids"])
        assert record["ledger"]["generated"] == own


async def test_an_heir_survives_a_restart_and_has_an_heir(tmp_path: Path):
    """What was asked again stays so; an heir of an heir gets both lives' turns."""
    async with talked(tmp_path, 2, "one", "two") as (client, old, before):
        heir = await heir_of(client, old)
        await client.say(heir, before[:1])
    async with serving(*says("three"), store=tmp_path / "s.db") as client:
        retried = await client.say(heir, before[:1])
        await client.say(heir, before[:3])
        third = await client.say(heir, before)
        record = await client.record(heir)
        last = await heir_of(client, heir)
        messages = await converse(client, last, 3)
        final, [sample] = await client.record(last), await client.samples(last)

    assert retried == before[1]
    assert [turn["role"] for turn in record["turns"]] == ["main"] * 3
    assert messages[5] == third
    assert final["ledger"]["generated"] == 0
    assert final["ledger"]["inherited"] == final["ledger"]["trained"] == sum(sample["loss_mask"])


async def test_an_agent_with_a_transcript_of_its_own_goes_on_at_once(tmp_path: Path):
    """The answers that it already has count as asked for."""
    async with talked(tmp_path, 2) as (client, old, before):
        heir = await heir_of(client, old)
        await client.say(heir, before)
        [sample] = await client.samples(heir)

    assert sample["metadata"]["turns"] == [0, 1, 2]


async def test_a_stream_of_an_inherited_answer_has_its_id_and_text(tmp_path: Path):
    async with serving(*says("one two three"), store=tmp_path / "s.db") as client:
        old = await client.create()
        answer = (await client.chat(old, [user("go")])).json()
        heir = await heir_of(client, old)
        streamed = await client.chat(heir, [user("go")], stream=True)
        record = await client.record(heir)

    assert answer["id"] in streamed.text
    assert "".join(
        part.split('"content":"')[1].split('"')[0] for part in streamed.text.split("\n") if '"content":"' in part
    )
    assert [turn["delivered"] for turn in record["turns"]] == [True]


async def test_other_sampling_is_another_call(tmp_path: Path):
    """Its turn names the parameter."""
    async with talked(tmp_path, 1, "one", "two") as (client, old, _):
        heir = await heir_of(client, old)
        await client.say(heir, [user("go")], temperature=0.5)
        record = await client.record(heir)

    assert [turn["role"] for turn in record["turns"]] == ["superseded", "main"]
    diverged = record["turns"][1]["notes"]["diverged"]
    assert diverged == {"message": 0, "field": "sampling", "recorded": "", "sent": '{"temperature":0.5}'}
    assert record["remarks"] == []
    assert record["inherits"]["because"] == "sampling"


async def test_other_tools_are_another_call(tmp_path: Path):
    """The record has no tools, only their number and digest, and the turn names both."""
    async with serving(*says("one", "two", "three"), store=tmp_path / "s.db") as client:
        old = await client.create()
        await client.say(old, [user("go")], tools=[tool("look")])
        heir = await heir_of(client, old)
        await client.say(heir, [user("go")], tools=[tool("look"), tool("find")])
        await client.say(heir, [user("go")], tools=[tool("look")])
        record = await client.record(heir)

    first, other = record["turns"]
    diverged = other["notes"]["diverged"]
    assert (diverged["field"], first["notes"]["asked_again"]) == ("tools", True)
    assert diverged["recorded"] == f"1 tools, digest {first['notes']['toolset'][:16]}"
    assert diverged["sent"] == f"2 tools, digest {other['notes']['toolset'][:16]}"
    assert record["inherits"]["because"] == "tools"


async def test_an_agent_that_ends_early_leaves_the_rest(tmp_path: Path):
    async with talked(tmp_path, 2, "one", "two") as (client, old, before):
        heir = await heir_of(client, old)
        await client.say(heir, before[:1])
        running = (await client.record(heir))["inherits"]
        await client.http.post(f"/sessions/{heir.session_id}/end")
        ended = (await client.record(heir))["inherits"]

    assert (running["asked_again"], running["ended_at"], running["because"]) == (1, None, None)
    assert (ended["ended_at"], ended["because"]) == (None, "agent")


async def test_a_call_with_stop_strings_is_found_again(tmp_path: Path):
    """The store has lists where a request has tuples."""
    wishes = {"stop": ["Observation:"], "temperature": 0.5, "max_tokens": 50}
    async with serving(*says("one", "two"), store=tmp_path / "s.db") as client:
        old = await client.create()
        await client.say(old, [user("go")], **wishes)
        heir = await heir_of(client, old, strict=True)
        await client.say(heir, [user("go")], **wishes)
        record = await client.record(heir)

    assert [turn["role"] for turn in record["turns"]] == ["main"]


@pytest.mark.parametrize("at_once", [True, False])
async def test_equal_calls_get_their_answers_in_order(tmp_path: Path, at_once: bool):
    """Best of two asks twice for the same; a third is sampled."""
    async with serving(*says("one", "two"), store=tmp_path / "s.db") as client:
        old = await client.create()
        first = [await client.say(old, [user("go")]) for _ in range(2)]
        heir = await heir_of(client, old)
        if at_once:
            again = await asyncio.gather(*(client.say(heir, [user("go")]) for _ in range(2)))
        else:
            again = [await client.say(heir, [user("go")]) for _ in range(2)]
        played = client.engine.played[heir.session_id]
        await client.say(heir, [user("go")])
        record = await client.record(heir)

    assert sorted(each["content"] for each in again) == sorted(each["content"] for each in first)
    assert played == 0
    assert [turn["notes"].get("inherited", "") for turn in record["turns"]] == ["trained", "trained", ""]


async def test_a_fork_reads_an_edited_message_in_all_its_turns(tmp_path: Path):
    """The agent sends what it knows; tokens and record have the edit, also in a further life of the fork."""
    async with talked(tmp_path, 3) as (client, old, before):
        await close(client, old)
        edits = [{"message": 2, "content": "other"}]
        fork = await inherit(client, old, before=1, trained=False, edits=edits)
        client.engine.play_from(fork.session_id, 1)
        again = await converse(client, fork, 3)
        client.engine.play_from(fork.session_id, 0)
        await client.say(fork, [user("aside"), *before[1:3]])
        [record, sample] = [await client.record(fork), (await client.samples(fork))[0]]
        heir = await heir_of(client, fork)
        await converse(client, heir, 3)
        repeated = await client.record(heir)

    assert again == before
    assert [turn["messages_delta"] for turn in record["turns"][:3]] == [[user("go")], [user("other")], [user("more 1")]]
    assert record["inherits"]["edits"] == edits
    assert (record["inherits"]["ended_at"], record["inherits"]["because"]) == (1, "fork")
    assert [turn["parent"] for turn in record["turns"]] == [None, 0, 1, None]
    read = toy_tokenizer().decode(sample["tokens"])
    assert "other" in read
    assert "more 0" not in read
    assert repeated["ledger"]["generated"] == 0
    assert repeated["inherits"]["asked_again"] == 3


async def test_the_aborted_turn_of_a_drained_session_is_sampled_anew(tmp_path: Path):
    """By a fork of it as by an heir: neither inherits it."""
    steps = (*says("one"), ScriptStep(text="a long and slow answer", token_delay_s=0.05))
    async with serving(*steps, store=tmp_path / "s.db") as client:
        old = await client.create()
        messages = await converse(client, old, 1)
        broken = asyncio.create_task(client.chat(old, messages))
        await client.sampling()
        await client.http.post(f"/sessions/{old.session_id}/drain")
        assert (await broken).status_code == 404
        aborted = (await client.record(old))["turns"][1]["status"]
        fork = await heir_of(client, old, before=1, trained=False)
        await converse(client, fork, 2)
        heir = await inherit(client, old)
        taken = [await client.record(each) for each in (fork, heir)]

    assert aborted == "aborted"
    assert [turn["status"] for turn in taken[0]["turns"]] == ["completed", "completed"]
    assert [each["inherits"]["turns"] for each in taken] == [1, 1]


async def test_a_turn_that_is_never_trained_is_not_forked(tmp_path: Path):
    async with serving(*says("one"), store=tmp_path / "s.db") as client:
        old = await client.create(trained_roles=["compaction"])
        await client.say(old, [user("go")])
        await close(client, old)
        answer = await client.http.post("/sessions", json={"inherits": {"session_id": old.session_id, "before": 0}})

    assert answer.status_code == 400
    assert "turn 0 is main, which is never trained" in answer.json()["error"]["message"]


async def test_the_first_prompt_can_be_edited(tmp_path: Path):
    async with talked(tmp_path, 2, "one", "two") as (client, old, _):
        fork = await heir_of(client, old, before=0, trained=False, edits=[{"message": 0, "content": "start"}])
        await converse(client, fork, 2)
        record = await client.record(fork)

    assert [turn["messages_delta"] for turn in record["turns"]] == [[user("start")], [user("more 0")]]


async def test_a_record_is_trained_by_one_heir_ever(tmp_path: Path):
    """Also after that heir was collected and deleted; the heirs of a fork keep its mask."""
    async with talked(tmp_path, 1, "one", "two") as (client, old, _):
        heir = await heir_of(client, old)
        await close(client, heir)
        again = await client.http.post("/sessions", json={"inherits": {"session_id": old.session_id}})
        fork = await inherit(client, heir, trained=False)
        second = await heir_of(client, fork)
        await client.say(second, [user("go")])
        record = await client.record(second)

    assert heir.session_id in again.json()["error"]["message"]
    assert [turn["notes"]["inherited"] for turn in record["turns"]] == ["masked"]
    assert record["ledger"]["trained"] == 0


async def test_an_aborted_turn_is_not_inherited(tmp_path: Path):
    """It is resampled."""
    async with talked(tmp_path, 1, "one", " ".join(["slow"] * 400)) as (client, old, messages):
        refused = await client.chat(old, messages, max_tokens=3)
        assert refused.status_code == 200
        heir = await heir_of(client, old)
        record = await client.record(heir)

    assert [turn["status"] for turn in record["turns"]] == ["completed", "truncated"]


async def test_turns_that_are_too_old_are_left_out_or_refused(tmp_path: Path):
    """By the heir's own limit; what follows them goes, too, and a strict heir takes all or nothing."""
    async with serving(*says(*ANSWERS), store=tmp_path / "s.db") as client:
        old = await client.create()
        client.engine.relabel("1")
        before = await converse(client, old, 2)
        client.engine.relabel("3")
        await client.say(old, before)
        await client.say(old, [user("something else")])
        await close(client, old)
        body = {"inherits": {"session_id": old.session_id}, "limits": {"staleness": 1}}
        strict = {**body, "inherits": {**body["inherits"], "strict": True}}
        refused = await client.http.post("/sessions", json=strict)
        heir = await client.create(**body)
        played = client.engine.played[heir.session_id]
        await client.say(heir, before[:1])
        record = await client.record(heir)

    assert refused.status_code == 400
    said = "expected tokens within limits.staleness 1 of weight version 3, turn 0 has version 1"
    assert said in refused.json()["error"]["message"]
    assert played == 0
    turns = [(turn["role"], turn["notes"].get("inherited")) for turn in record["turns"]]
    assert turns == [("superseded", "trained"), ("main", None)]
    assert record["ledger"]["generated"] == record["ledger"]["trained"]


async def test_an_inherited_branch_that_ages_is_refused_as_a_live_one_is(tmp_path: Path):
    """Its answers are repeated; the next call would make a sample that is too old."""
    async with serving(*says(*ANSWERS), store=tmp_path / "s.db") as client:
        old = await client.create()
        client.engine.relabel("1")
        before = await converse(client, old, 1)
        await close(client, old)
        heir = await client.create(inherits={"session_id": old.session_id}, limits={"staleness": 1})
        client.engine.relabel("3")
        await client.http.get(f"/sessions/{heir.session_id}/samples")  # reads the version
        again = await client.say(heir, before[:1])
        refused = await client.chat(heir, before)

    assert again == before[1]
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "limit_reached")


async def test_of_two_heirs_at_once_one_is_refused(tmp_path: Path):
    async with talked(tmp_path, 1, "one") as (client, old, _):
        await close(client, old)
        body = {"inherits": {"session_id": old.session_id}}
        answers = await asyncio.gather(*(client.http.post("/sessions", json=body) for _ in range(8)))

    refused = [answer for answer in answers if answer.status_code == 400]
    assert len(refused) == len(answers) - 1
    assert all("continued with this one" in answer.json()["error"]["message"] for answer in refused)


async def test_the_last_turn_of_a_drained_session_is_not_inherited(tmp_path: Path):
    """It was aborted after some tokens, which the earlier session's own sample has."""
    hangs = ScriptStep(text="An answer.", fault=ScriptedFault.HANG, fault_after=3)
    async with serving(*says("one"), hangs, store=tmp_path / "s.db") as client:
        old = await client.create()
        messages = await converse(client, old, 1)
        call = asyncio.create_task(client.chat(old, messages))
        await client.sampling()
        lives = await client.http.post("/sessions", json={"inherits": {"session_id": old.session_id}})
        await client.http.post(f"/sessions/{old.session_id}/drain")
        refused = await call
        heir = await inherit(client, old)
        earlier, record = await client.record(old), await client.record(heir)

    assert "still lives" in lives.json()["error"]["message"]
    assert (refused.status_code, [turn["status"] for turn in earlier["turns"]]) == (404, ["completed", "aborted"])
    assert [turn["status"] for turn in record["turns"]] == ["completed"]


async def test_an_engine_that_is_gone_costs_new_calls_only(tmp_path: Path):
    """Recorded answers need none."""
    gone = ScriptStep(fault=ScriptedFault.UNAVAILABLE)
    async with talked(tmp_path, 1, "one") as (client, old, before):
        await close(client, old)
    async with serving(gone, store=tmp_path / "s.db", settings=ServerSettings(engine_attempts=1)) as client:
        heir = await inherit(client, old)
        again = await client.say(heir, before[:1])
        failed = await client.chat(heir, before)

    assert (again, failed.status_code >= 500) == (before[1], True)


@pytest.mark.parametrize(
    ("how", "param", "said"),
    [
        ({"before": 9}, "inherits.before", "there is no turn 9"),
        ({"before": -1}, "inherits.before", ">= 0"),
        ({"session_id": "0" * 32}, "inherits.session_id", "no session 0000"),
        ({"session_id": "../etc"}, "inherits.session_id", "regex"),
        ({"edits": [{"message": 0, "content": ""}]}, "inherits.edits", "none without `before`"),
        ({"before": 0, "edits": [{"message": 1, "content": ""}]}, "inherits.edits", "0 (user); got message 1"),
    ],
)
async def test_an_impossible_inheritance_is_named(tmp_path: Path, how: dict[str, Any], param: str, said: str):
    async with talked(tmp_path, 1, "one") as (client, old, _):
        await close(client, old)
        answer = await client.http.post("/sessions", json={"inherits": {"session_id": old.session_id} | how})

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert said in answer.json()["error"]["message"]


async def test_a_record_has_one_heir_at_a_time_and_no_living_session(tmp_path: Path):
    """Two would train its tokens twice; forks may be many."""
    async with talked(tmp_path, 1, "one") as (client, old, _):
        body = {"inherits": {"session_id": old.session_id}}
        lives = await client.http.post("/sessions", json=body)
        await close(client, old)
        await client.create(**body)
        second = await client.http.post("/sessions", json=body)
        fork = await client.http.post("/sessions", json={"inherits": {**body["inherits"], "trained": False}})
        both = await client.http.post("/sessions", json={**body, "resumes": old.session_id})
        matching = await client.http.post("/sessions", json={**body, "matching": ["exact"]})

    assert "still lives" in lives.json()["error"]["message"]
    assert "continued with this one" in second.json()["error"]["message"]
    assert fork.status_code == 200
    assert both.json()["error"]["param"] == "inherits"
    assert matching.json()["error"]["param"] in ("matching", "inherits.session_id")


async def test_a_server_without_a_store_inherits_nothing_that_was_closed():
    async with serving(*says("one")) as client:
        old = await client.create()
        await close(client, old)
        refused = await client.http.post("/sessions", json={"inherits": {"session_id": old.session_id}})

    assert refused.status_code == 400
    assert "does not keep sessions" in refused.json()["error"]["message"]


async def test_an_edit_of_a_root_is_of_its_own_conversation(tmp_path: Path):
    """A compaction, or a subagent with the same tools, says something else there."""
    system = {"role": "system", "content": "Play."}
    async with serving(*says(*ANSWERS), store=tmp_path / "s.db") as client:
        old = await client.create()
        await client.say(old, [system, user("go")])
        await close(client, old)
        edits = [{"message": 1, "content": "start"}]
        fork = await inherit(client, old, before=0, trained=False, edits=edits)
        for said in ("go", "a summary of all so far"):
            await client.say(fork, [system, user(said)])
        record = await client.record(fork)
    said = [turn["messages_delta"][-1]["content"] for turn in record["turns"]]
    assert said == ["start", "a summary of all so far"]

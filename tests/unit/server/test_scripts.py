"""Sessions with a script: their turns say its steps, whatever cuts them, and nothing else is ever sampled for them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cli.options import ServerOptions
from harness.engines.base import TokenProvider
from harness.engines.pool.discovered import DiscoveredPool, FoundWorker
from harness.engines.pool.pool import EnginePool
from harness.engines.scripted import Script, ScriptedEngine, ScriptedFault, ScriptStep
from harness.server.settings import ServerSettings
from harness.types import Json
from tests.builders import EOS, tool, toy_tokenizer, user
from tests.fake_engines.fake_server import serving as serving_fake
from tests.fake_engines.providers import fake_provider, make_fake
from tests.session_servers.served import PATIENCE_S, Client, Served, bearer, eventually, serving, serving_with, url_of
from tests.session_servers.store_file import ledger_of, read_file

ALLOWED = ServerSettings(allow_forced_tokens=True)
HI = [user("hi")]
CALLS = [f'<tool_call>\n{{"name": "add", "arguments": {{"a": {n}}}}}\n</tool_call>' for n in range(5)]
SAYINGS = [*CALLS, "It is ten."]
SCRIPT = {"steps": [{"text": text} for text in SAYINGS]}
SERVED_KINDS = ("sglang", "sglang-incremental", "vllm", "vllm-completions")


def ids(text: str) -> list[int]:
    """What a step with `text` says."""
    return [*toy_tokenizer().encode(text), EOS]


def scripted(*steps: ScriptStep) -> ScriptedEngine:
    """An engine that would say something else."""
    return ScriptedEngine(toy_tokenizer(), Script(steps or (ScriptStep(text="Never this."),)))


@asynccontextmanager
async def engine_of(kind: str, *steps: ScriptStep, obeys: bool = True) -> AsyncIterator[TokenProvider]:
    """An engine of `kind`, which a server enters."""
    if kind == "scripted":
        yield scripted(*steps)
        return
    fake = make_fake(kind, scripted(*steps), obeys=obeys)
    async with serving_fake(fake, notices_disconnects=kind.startswith("vllm")):
        yield fake_provider(fake)


@pytest.fixture(name="client")
async def _client() -> AsyncIterator[Client]:
    """A client of a server that allows scripts, in front of a scripted engine."""
    async with serving_with(scripted(), settings=ALLOWED) as client:
        yield client


async def play(client: Client, session: Served, turns: int) -> list[Any]:
    """An agent that answers calls of tools, for so many turns; the conversation."""
    messages: list[Any] = [*HI]
    for _ in range(turns):
        reply = await client.say(session, messages, tools=[tool()])
        messages.append(reply)
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": "5"} for call in reply.get("tool_calls") or ()
        ]
    return messages


def outputs(record: Json) -> list[list[int]]:
    """The output ids of its turns."""
    return [turn["output_ids"] for turn in record["turns"]]


@pytest.mark.parametrize("kind", ["scripted", *SERVED_KINDS])
async def test_a_tool_loop_of_six_turns_says_the_script_and_is_never_trained(kind: str) -> None:
    """Exactly its ids, with the engine's own logprobs; stamped, masked, and balanced in the ledger."""
    async with engine_of(kind) as engine, serving_with(engine, settings=ALLOWED) as client:
        session = await client.create(script=SCRIPT)
        messages = await play(client, session, 6)
        record, [sample] = await client.record(session), await client.samples(session)

    said = [ids(text) for text in SAYINGS]
    tokens = sum(map(len, said))
    assert outputs(record) == said
    assert [turn["script_step"] for turn in record["turns"]] == [0, 1, 2, 3, 4, 5]
    assert [turn["status"] for turn in record["turns"]] == ["completed"] * 6
    assert [len(turn["logprobs"]) for turn in record["turns"]] == [len(each) for each in said]
    assert messages[-1]["content"] == "It is ten."
    ledger = record["ledger"]
    assert (ledger["generated"], ledger["trained"], ledger["masked"], ledger["dropped"]) == (tokens, 0, tokens, {})
    assert sum(sample["loss_mask"]) == 0
    assert sample["metadata"]["scripted_turns"] == 6


async def test_a_session_without_a_script_is_not_stamped(client: Client) -> None:
    """On the same server: the engine chooses its words, and they are trained."""
    session = await client.create()
    await client.say(session, HI)
    record, [sample] = await client.record(session), await client.samples(session)

    [turn] = record["turns"]
    assert (turn["script_step"], turn["output_ids"]) == (None, ids("Never this."))
    assert (record["ledger"]["masked"], "scripted_turns" in sample["metadata"]) == (0, False)


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
@settings(deadline=None, max_examples=8)
@given(cuts=st.lists(st.integers(0, 30), max_size=6), text=st.text("abc<>é日", max_size=12))
async def test_wherever_an_engine_cuts_a_turn_the_rest_of_its_step_follows(
    kind: str, cuts: list[int], text: str
) -> None:
    """Each request after a cut has the ids left to say that are not said yet; the turn ends with its step."""
    faults = [ScriptStep(fault=ScriptedFault.ABORT, fault_after=cut) for cut in cuts]
    patient = ServerSettings(allow_forced_tokens=True, max_unsolicited_aborts=100)
    fake = make_fake(kind, scripted(), obeys=True)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(serving_fake(fake, notices_disconnects=kind == "vllm"))
        client = await stack.enter_async_context(serving_with(fake_provider(fake), settings=patient))
        session = await client.create(script={"steps": [{"text": text}, {"text": "then this"}]})
        fake.engine._script = Script((*faults, ScriptStep()))  # it was tested before
        fake.engine.play_from("", 0)
        messages: list[Any] = [*HI]
        for _ in range(2):
            messages += [await client.say(session, messages), user("on")]
        record = await client.record(session)

    assert outputs(record) == [ids(text), ids("then this")]
    assert [turn["status"] for turn in record["turns"]] == ["completed"] * 2
    for turn in record["turns"]:
        assert [each["end"] for each in turn["segments"][:-1]] == [each["start"] for each in turn["segments"][1:]]
    assert record["ledger"]["masked"] == record["ledger"]["generated"] == sum(map(len, outputs(record)))


async def test_a_step_that_was_cut_goes_on_at_the_next_server(tmp_path: Path) -> None:
    """The script is in the store; the client's retry gets the whole step, sampled once."""
    at_once = ServerSettings(allow_forced_tokens=True, stop_grace_s=0.0)
    hanging = ScriptStep(fault=ScriptedFault.HANG, fault_after=4)
    async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
        async with serving(hanging, store=tmp_path / "s.db", settings=at_once) as client:
            session = await client.create(script={"steps": [{"text": "a long answer"}, {"text": "next"}]})
            request = asyncio.create_task(http.post(client.url + url_of(session), json={"model": "m", "messages": HI}))
            await client.sampling()
        assert (await request).status_code == 503
    async with serving(store=tmp_path / "s.db", settings=ALLOWED) as client:
        first = await client.say(session, HI)
        second = await client.say(session, [*HI, first, user("on")])
        record = await client.record(session)

    assert (first["content"], second["content"]) == ("a long answer", "next")
    assert outputs(record) == [ids("a long answer"), ids("next")]
    assert [segment["end"] for segment in record["turns"][0]["segments"]] == [4, len(ids("a long answer"))]
    assert ledger_of(read_file(tmp_path / "s.db")[session.session_id]) == record["ledger"]


async def test_a_script_ends_and_nothing_is_sampled_behind_it(client: Client) -> None:
    """A typed error that ends every client, before an engine is asked."""
    session = await client.create(script={"steps": [{"text": "only this"}]})
    reply = await client.say(session, HI)
    answer = await client.chat(session, [*HI, reply, user("more")])
    record = await client.record(session)

    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "script_ended")
    assert answer.headers["x-should-retry"] == "false"
    assert (outputs(record), record["refusals"]) == ([ids("only this")], {"script_ended": 1})


async def test_siblings_say_the_same_step_and_another_conversation_begins_again(client: Client) -> None:
    """A step belongs to a place in a branch, not to a count of calls."""
    session = await client.create(script={"steps": [{"text": "one"}, {"text": "two"}]})
    first = await client.say(session, HI)
    behind = [[*HI, first, user(text)] for text in ("this way", "or that")]
    said = [await client.say(session, messages) for messages in (*behind, [user("a title, please")])]

    assert [message["content"] for message in said] == ["two", "two", "one"]


@pytest.mark.parametrize("kind", ["scripted", "sglang", "vllm"])
async def test_a_step_without_an_end_is_cut_behind_its_last_id(kind: str) -> None:
    """No engine continues by itself, whatever budget the agent gave it."""
    steps = [{"text": "no end", "finish": "length"}, {"tokens": [7, 8, 9]}]
    async with engine_of(kind) as engine, serving_with(engine, settings=ALLOWED) as client:
        sessions = [await client.create(script={"steps": [step]}) for step in steps]
        for session in sessions:
            await client.chat(session, HI, max_tokens=100)
        turns = [(await client.record(session))["turns"][0] for session in sessions]

    assert [(turn["end"], turn["output_ids"]) for turn in turns] == [
        ("length", ids("no end")[:-1]),
        ("length", [7, 8, 9]),
    ]


async def test_what_would_forbid_a_token_of_the_step_is_left_out(client: Client) -> None:
    """A schema and a least length are wishes to a model; a script is not one."""
    session = await client.create(script={"steps": [{"text": "no"}]}, sampling={"min_tokens": 50})
    await client.say(session, HI, response_format={"type": "json_object"})
    [turn] = (await client.record(session))["turns"]

    used = turn["sampling"]["used"]
    assert (turn["output_ids"], used["min_new_tokens"], used["json_schema"]) == (ids("no"), 0, None)


# Who may, and with what

CREATE = {"script": {"steps": [{"text": "x"}]}}


async def refusal_of(client: Client, **config: Any) -> tuple[int, str]:
    """Status and code of a creation that is refused."""
    answer = await client.http.post("/sessions", json=config)
    assert (await client.http.get("/sessions")).json()["sessions"] == []
    return answer.status_code, answer.json()["error"]["code"]


async def test_a_server_that_does_not_allow_it_refuses_the_session() -> None:
    """Its engine could; its operator has not said so."""
    async with serving() as client:
        assert await refusal_of(client, **CREATE) == (403, "script_refused")


@pytest.mark.parametrize("kind", SERVED_KINDS)
async def test_an_engine_that_says_its_own_words_is_found_out(kind: str) -> None:
    """A server without the plugin ignores what it does not know: its answers to a test show it."""
    async with engine_of(kind, obeys=False) as engine, serving_with(engine, settings=ALLOWED) as client:
        assert await refusal_of(client, **CREATE) == (403, "script_refused")
        session = await client.create()
        assert (await client.chat(session, HI)).status_code == 200


async def test_a_pool_takes_scripts_when_a_worker_follows_them() -> None:
    """Sessions with a script are placed on those that do, of any kind, and others on all; with none it takes none."""
    async with AsyncExitStack() as stack:
        sglang, vllm, deaf = [
            await stack.enter_async_context(engine_of(kind, obeys=obeys))
            for kind, obeys in (("sglang", True), ("vllm", True), ("vllm", False))
        ]
        async with serving_with(EnginePool([sglang, vllm]), settings=ALLOWED) as client:
            session = await client.create(script=SCRIPT)
            await play(client, session, 6)
            assert outputs(await client.record(session)) == [ids(text) for text in SAYINGS]
        pool = EnginePool([deaf, sglang])
        async with serving_with(pool, settings=ALLOWED) as client:
            for _ in range(2):
                session = await client.create(script=SCRIPT)
                await play(client, session, 6)
                assert outputs(await client.record(session)) == [ids(text) for text in SAYINGS]
            sessions = {each.name: each.sessions for each in pool.workers}
            await client.say(await client.create(), HI)
            everybody = {each.name: each.sessions for each in pool.workers}
        async with serving_with(EnginePool([deaf]), settings=ALLOWED) as client:
            assert await refusal_of(client, **CREATE) == (403, "script_refused")

    assert sessions == {"0": 0, "1": 2}
    assert everybody == {"0": 1, "1": 2}


async def test_workers_that_a_pool_finds_are_asked_too() -> None:
    """Those that join later as well: one that does not follow gets no session with a script, and costs none its own."""
    fakes = [make_fake("sglang", scripted(), obeys=True), make_fake("vllm", scripted())]
    async with AsyncExitStack() as stack:
        for fake in fakes:
            await stack.enter_async_context(serving_fake(fake, notices_disconnects=fake is fakes[1]))
        listed = [FoundWorker(fakes[0].url, lambda: fake_provider(fakes[0]))]
        pool = DiscoveredPool(lambda: listed, interval_s=0.02)
        client = await stack.enter_async_context(serving_with(pool, settings=ALLOWED))
        early = await client.create(script=SCRIPT)
        listed.append(FoundWorker(fakes[1].url, lambda: fake_provider(fakes[1])))
        await eventually(lambda: len(list(pool.workers)) == len(fakes))
        late = await client.create(script=SCRIPT)
        for session in (early, late):
            await play(client, session, 6)
            assert outputs(await client.record(session)) == [ids(text) for text in SAYINGS]
        sessions = {each.name: each.sessions for each in pool.workers}

    assert sessions == {fakes[0].url: 2, fakes[1].url: 0}


@asynccontextmanager
async def left_by_its_follower(queue_timeout_s: float) -> AsyncIterator[tuple[Client, Callable[[], None]]]:
    """A server whose pool had a worker that follows scripts, and a call that brings it back."""
    fakes = [make_fake("sglang", scripted(), obeys=True), make_fake("vllm", scripted())]
    async with AsyncExitStack() as stack:
        for fake in fakes:
            await stack.enter_async_context(serving_fake(fake, notices_disconnects=fake is fakes[1]))
        follower, deaf = [FoundWorker(fake.url, partial(fake_provider, fake)) for fake in fakes]
        listed = [follower, deaf]
        pool = DiscoveredPool(lambda: listed, interval_s=0.02, queue_timeout_s=queue_timeout_s)
        client = await stack.enter_async_context(serving_with(pool, settings=ALLOWED))
        await eventually(lambda: len(pool.workers) == len(fakes))
        listed.remove(follower)
        await eventually(lambda: len(pool.workers) == 1)
        yield client, lambda: listed.append(follower)


async def test_a_turn_waits_for_a_worker_that_follows_scripts_to_come_back() -> None:
    """As it does in a pool that has nobody left: nothing is refused for good."""
    async with left_by_its_follower(PATIENCE_S) as (client, bring_back):
        session = await client.create(script=SCRIPT)
        turn = asyncio.create_task(client.chat(session, HI))
        await eventually(lambda: client.engine.waiting == 1)
        bring_back()
        assert (await turn).status_code == 200


async def test_a_turn_that_no_worker_came_back_for_may_be_asked_for_again() -> None:
    """It is 503 when its time to wait is used up, and no client is told to give up."""
    async with left_by_its_follower(0.01) as (client, _):
        answer = await client.chat(await client.create(script=SCRIPT), HI)

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    assert "x-should-retry" not in answer.headers


def test_the_command_line_allows_it_by_name_alone() -> None:
    """`harness serve` and `harness router` share the option."""
    assert not ServerOptions(no_auth=True).settings().allow_forced_tokens
    assert ServerOptions(no_auth=True, allow_forced_tokens=True).settings().allow_forced_tokens


async def test_an_engine_that_forgets_how_to_follow_is_not_believed() -> None:
    """Restarted without the plugin: its answer is refused, and none of it becomes a turn; what came is counted."""
    fake = make_fake("sglang", scripted(), obeys=True)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(serving_fake(fake, notices_disconnects=False))
        client = await stack.enter_async_context(serving_with(fake_provider(fake), settings=ALLOWED))
        session = await client.create(script=SCRIPT)
        fake.obeys = False
        answer = await client.chat(session, HI)
        record = await client.record(session)

    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_reply_invalid")
    ledger = record["ledger"]
    assert (outputs(record), ledger["dropped"]) == ([[]], {"invalid_reply": ledger["generated"]})


async def test_a_server_that_no_longer_allows_it_serves_no_turn_of_such_a_session(tmp_path: Path) -> None:
    """The script is kept; its turns are refused, and never sampled in its place."""
    async with serving(store=tmp_path / "s.db", settings=ALLOWED) as client:
        session = await client.create(script=SCRIPT)
    async with serving(store=tmp_path / "s.db") as client:
        answer = await client.chat(session, HI)
        record = await client.record(session)

    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "script_refused")
    assert record["turns"] == []


async def test_an_agent_can_neither_bring_a_script_nor_read_one() -> None:
    """With the key of its session it has model calls, and nothing else; in their bodies a script means nothing.

    A field that engines' own plugins read is refused.
    """
    guarded = ServerSettings(allow_forced_tokens=True, admin_token="secret")
    async with engine_of("scripted") as engine, serving_with(engine, settings=guarded) as client:
        session = await client.create(script=SCRIPT)
        agent = bearer(session.api_key)
        created = await client.http.post("/sessions", json=CREATE, headers=agent)
        read = await client.http.get(f"/sessions/{session.session_id}", headers=agent)
        model_call = {"messages": HI, "script": CREATE["script"]}
        forcing = model_call | {"custom_params": {"force_ids": [5]}}
        forced = await client.http.post(url_of(session), json=forcing, headers=agent)
        answer = await client.http.post(url_of(session), json=model_call, headers=agent)
        plain = await client.create()
        other = await client.http.post(url_of(plain), json=model_call, headers=bearer(plain.api_key))
        said = [outputs(await client.record(each)) for each in (session, plain)]

    assert (created.status_code, read.status_code) == (401, 401)
    assert (forced.status_code, answer.status_code, other.status_code) == (400, 200, 200)
    assert said == [[ids(CALLS[0])], [ids("Never this.")]]


@pytest.mark.parametrize(
    ("script", "names"),
    [
        ([], "script"),
        ({}, "script"),
        ({"steps": []}, "script.steps"),
        ({"steps": [{}]}, "script.steps[0]"),
        ({"steps": [{"text": "a", "tokens": [3]}]}, "script.steps[0]"),
        ({"steps": [{"text": "a"}, {"tokens": []}]}, "script.steps[1]"),
        ({"steps": [{"tokens": [259]}]}, "script.steps[0]"),
        ({"steps": [{"tokens": [-1]}]}, "script.steps[0].tokens[0]"),
        ({"steps": [{"tokens": [True]}]}, "script.steps[0].tokens[0]"),
        ({"steps": [{"text": "", "finish": "length"}]}, "script.steps[0]"),
        ({"steps": [{"text": "a", "finish": "abort"}]}, "script.steps[0].finish"),
        ({"steps": [{"text": "a", "delay_s": 1.0}]}, "script.steps[0]"),
        ({"steps": [{"text": "a" * 5000}]}, "script.steps[0]"),
    ],
)
async def test_a_malformed_script_is_refused_by_the_name_of_its_field(script: Any, names: str) -> None:
    """400, and no session."""
    async with serving(settings=ALLOWED, context_length=4096) as client:
        answer = await client.http.post("/sessions", json={"script": script})
        listed = (await client.http.get("/sessions")).json()["sessions"]

    assert (answer.status_code, answer.json()["error"]["param"], listed) == (400, names, [])


async def test_a_script_has_a_limit_of_its_own() -> None:
    """It is kept as long as its session; the operator says how much that may be."""
    async with serving(settings=ALLOWED) as client:
        answer = await client.http.post("/sessions", json={"script": {"steps": [{"text": "a" * (1 << 20)}]}})

    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "over_limit", "script")


async def test_null_is_no_script() -> None:
    """As for any other field that a client leaves open."""
    async with serving() as client:
        session = await client.create(script=None)
        assert (await client.chat(session, HI)).status_code == 200


async def test_a_long_script_is_encoded_beside_the_event_loop(loop_watch: object) -> None:
    """Half a megabyte of words."""
    script = {"steps": [{"text": "word " * 1000}] * 100}
    async with serving(settings=ALLOWED) as client:
        session = await client.create(script=script)
        await client.say(session, HI)
        [turn] = (await client.record(session))["turns"]

    assert turn["output_length"] == 5001


# Takeovers


async def drained(client: Client, session: Served) -> None:
    """The session's rollout is cut short."""
    await client.http.post("/sessions/drain")
    await client.http.post("/sessions/resume")


async def test_a_session_that_takes_over_goes_on_with_the_script(client: Client) -> None:
    """At the step where its predecessor was, without being told the script again."""
    old = await client.create(script=SCRIPT)
    await play(client, old, 2)
    await drained(client, old)
    new = await client.create(resumes=old.session_id)
    await play(client, new, 6)
    record = await client.record(new)

    assert outputs(record) == [ids(text) for text in SAYINGS]


@pytest.mark.parametrize(("before", "after"), [(SCRIPT, CREATE["script"]), (None, SCRIPT)])
async def test_a_session_that_takes_over_has_no_other_script(client: Client, before: Json | None, after: Json) -> None:
    """A turn that was cut could not continue in another step, nor in one where the model had begun."""
    old = await client.create(script=before)
    await drained(client, old)
    answer = await client.http.post("/sessions", json={"resumes": old.session_id, "script": after})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "script")

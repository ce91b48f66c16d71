"""Which role a call has, over HTTP, and what becomes of its tokens by it."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import structs

from harness.engines.scripted import ScriptedFault, ScriptStep
from harness.samples.delivery import Branch
from harness.samples.roles import Role, find_roles
from harness.server.settings import ServerSettings
from harness.sessions.session import Session
from harness.types import Json
from tests.builders import new_session, take_turn, tool, user
from tests.session_servers.served import Client, Served, bearer, eventually, says, serving, session_on, url_of

TOOLS = [tool("add", a={"type": "integer"})]
CALL = '\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
SUMMARY = "The agent has read the file and found that the third line is wrong, and has not mended it yet."
SYSTEM = {"role": "system", "content": "You are an agent."}


async def ask(client: Client[Any], session: Served, messages: list[Json], **fields: Any) -> list[Json]:
    """The history after one more call."""
    return [*messages, await client.say(session, messages, **fields)]


async def roles(client: Client[Any], session: Served) -> list[str]:
    """The roles of the session's turns."""
    return [turn["role"] for turn in (await client.record(session))["turns"]]


async def test_an_empty_call_never_replaces_a_rollout():
    """Three completed turns, then a title that is cut before its first token: the sample is what it was (A3)."""
    steps = says("one", "two", "three")
    async with session_on(*steps, ScriptStep(text="a title", fault=ScriptedFault.HANG)) as (client, session):
        history: list[Json] = [SYSTEM]
        for text in ("Go.", "On.", "And?"):
            history = await ask(client, session, [*history, user(text)], tools=TOOLS)
        title = asyncio.create_task(client.chat(session, [user("A title?")]))
        await eventually(lambda: bool(client.engine.live))
        title.cancel()
        await asyncio.wait({title})
        await client.http.post("/sessions/drain")
        [sample] = await client.samples(session)
        record = await client.record(session)

    assert (sample["metadata"]["turns"], sample["status"]) == ([0, 1, 2], "completed")
    assert record["ledger"]["trained"] == record["ledger"]["generated"]


async def test_a_failed_call_decides_nothing_about_others():
    """The first call has tools and is rejected, the client falls back to text: its turns are the rollout (A4)."""
    async with session_on(ScriptStep(fault=ScriptedFault.REJECT), *says("one", "two")) as (client, session):
        assert (await client.chat(session, [user("Go.")], tools=TOOLS)).status_code >= 400
        history = await ask(client, session, [user("Go.")])
        await ask(client, session, [*history, user("On.")])
        [sample] = await client.samples(session)
        assert await roles(client, session) == ["main", "main", "main"]

    assert sample["metadata"]["turns"] == [1, 2]


@pytest.mark.parametrize(
    ("kept", "role", "trained"),
    [
        (SUMMARY, "compaction", True),
        (f"Analysis is gone. {SUMMARY} Go on.", "compaction", True),
        ("Somebody else has written all of this, and not a word of it was sampled.", "side", False),
    ],
)
async def test_a_summary_is_trained_when_its_text_is_used(kept: str, role: str, trained: bool):
    """A compaction whose text the client has replaced by its own is nothing that the agent continued with (A5)."""
    async with session_on(*says("one", SUMMARY, "two", "three")) as (client, session):
        history = await ask(client, session, [SYSTEM, user("Go.")], tools=TOOLS)
        told = "\n".join(str(each["content"]) for each in history)
        await ask(client, session, [{"role": "system", "content": "You sum up."}, user(told)])
        fresh = await ask(client, session, [SYSTEM, user(f"So far: {kept}")], tools=TOOLS)
        await ask(client, session, [*fresh, user("On.")], tools=TOOLS)
        record, samples = await client.record(session), await client.samples(session)

    assert [turn["role"] for turn in record["turns"]] == ["main", role, "main", "main"]
    assert [1] in [sample["metadata"]["turns"] for sample in samples] or not trained
    assert record["ledger"]["dropped"] == ({} if trained else {"side": record["turns"][1]["output_length"]})


async def test_a_compaction_of_a_compaction_is_one():
    """Each summary stands in the prompt of the next context."""
    second = SUMMARY.replace("third line", "seventh line").replace("mended it yet", "looked at the rest of that file")
    async with session_on(*says("one", SUMMARY, "two", second, "three")) as (client, session):
        prompt = [SYSTEM, user("Go.")]
        for summary in (SUMMARY, second):
            history = await ask(client, session, prompt, tools=TOOLS)
            await ask(client, session, [*history, user("Sum it up.")], tools=TOOLS)
            prompt = [SYSTEM, user(f"So far: {summary}")]
        await ask(client, session, prompt, tools=TOOLS)

        assert await roles(client, session) == ["main", "compaction", "main", "compaction", "main"]


async def test_a_call_of_another_client_while_a_tool_runs_is_a_stray():
    """Served, recorded, never trained, counted; refused where the session wants that."""
    async with serving(*says(f"I look.{CALL}", "I am the program.", "done")) as client:
        for strays, status in (("serve", 200), ("refuse", 403)):
            session = await client.create(strays=strays)
            history = await ask(client, session, [SYSTEM, user("Go.")], tools=TOOLS)
            headers = bearer(session.api_key) | {"user-agent": "curl/8.5.0"}
            body = {"model": "m", "messages": [user("What is the answer?")]}
            answer = await client.http.post(url_of(session), json=body, headers=headers)
            assert answer.status_code == status, answer.text
            result = {"role": "tool", "tool_call_id": history[-1]["tool_calls"][0]["id"], "content": "it printed 1"}
            await ask(client, session, [*history, result], tools=TOOLS)
            record, [sample] = await client.record(session), await client.samples(session)
            by_role = {turn["role"]: turn["output_length"] for turn in record["turns"]}

            if strays == "serve":
                assert record["ledger"]["dropped"] == {"stray": by_role["stray"]}
                assert "curl/8.5.0" in next(each["evidence"] for each in record["turns"] if each["role"] == "stray")
            else:
                assert answer.json()["error"]["code"] == "stray_refused"
                assert record["refusals"] == {"stray_refused": 1}
            assert record["ledger"]["trained"] == sum(sample["loss_mask"])


async def test_two_agents_in_one_session():
    """The one that continues longer is the rollout; the other client is another program."""
    async with session_on(*says(*(f"answer {number}" for number in range(5)))) as (client, session):
        first, second = [SYSTEM, user("Go.")], [{"role": "system", "content": "You are another."}, user("Go, too.")]
        headers = bearer(session.api_key) | {"user-agent": "other/1.0"}
        for step in range(3):
            first = [*await ask(client, session, first, tools=TOOLS), user("On.")]
            if step < 2:
                body = {"model": "m", "messages": second, "tools": [tool("other")]}
                answer = await client.http.post(url_of(session), json=body, headers=headers)
                second = [*second, answer.json()["choices"][0]["message"], user("On.")]
        assert await roles(client, session) == ["main", "stray", "main", "stray", "main"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("trained_roles", roles) for roles in ([], ["side"], ["main", "stray"], ["rejected"], ["nothing"])),
        *(("selection", name) for name in ("turns", "best", "tests.nowhere:choose")),
    ],
)
async def test_roles_that_are_never_trained_and_a_selection_that_is_not_offered_are_refused(field: str, value: Any):
    """By the name of the field; a path in a request names code: only those that the operator allows."""
    async with serving() as client:
        answer = await client.http.post("/sessions", json={field: value})

    assert (answer.status_code, field in answer.text) == (400, True)


async def test_a_policy_may_train_answers_that_the_agent_left():
    """Both answers to one prompt are trained, each once; by default the one that was left is dropped by name."""
    for trained_roles, dropped in ((None, {"resample"}), (["main", "resample"], set())):
        async with serving(*says("left", "taken", "on")) as client:
            session = await client.create(**({"trained_roles": trained_roles} if trained_roles else {}))
            await ask(client, session, [SYSTEM, user("Go.")])
            history = await ask(client, session, [SYSTEM, user("Go.")])
            await ask(client, session, [*history, user("On.")])
            ledger = (await client.record(session))["ledger"]
            samples = await client.samples(session)

        assert set(ledger["dropped"]) == dropped
        assert sum(sum(sample["loss_mask"]) for sample in samples) == ledger["trained"]
        assert sum(sample["weight"] for sample in samples) == pytest.approx(1)


def process(number: int, program: str, began_at: float, *ancestors: int) -> Json:
    """What the server noted of the process behind a connection."""
    return {
        "id": f"p{number}",
        "program": program,
        "began_at": began_at,
        "ancestors": [f"p{each}" for each in ancestors],
    }


def noted(session: Session, *processes: Json) -> list[Role]:
    """The roles of calls with one system prompt and the same tools, each by one of `processes`."""
    for number, each in enumerate(processes):
        take_turn(session, [SYSTEM, user(f"task {number}")], f"answer {number}")
        turn = session._tree.turn(number)  # builders note no client
        notes = structs.replace(turn.notes, client={"user_agent": "sdk", "process": each})
        session._tree.replace(structs.replace(turn, notes=notes))
    return [each.role for each in find_roles(session.turns).values()]


def test_a_program_below_the_agent_is_a_stray_whatever_it_copies():
    """Same client, system prompt and tools; its process is another program, and began behind the first call (A6)."""
    agent = process(1, "python agent.py", 900.0, 0)
    assert noted(new_session(), agent, process(2, "python made.py", 1_005.0, 1, 0), agent) == [
        Role.MAIN,
        Role.STRAY,
        Role.MAIN,
    ]


@pytest.mark.parametrize(
    "other",
    [
        process(2, "python agent.py", 1_005.0, 1, 0),  # the agent's own program: a worker of it
        process(2, "python made.py", 905.0, 1, 0),  # a helper that was there before the first call
        process(2, "python made.py", 1_005.0, 0),  # beside the first caller: the agent is a script of several programs
    ],
)
def test_a_process_of_the_agent_is_no_stray(other: Json):
    """Evidence has three parts: below the first caller, another program, later."""
    assert noted(new_session(), process(1, "python agent.py", 900.0, 0), other) == [Role.MAIN, Role.MAIN]


def pick_last(branches: Sequence[Branch]) -> list[int]:
    """A selection of one's own: the branch that was begun last."""
    return [len(branches) - 1]


def pick_what_is_not_there(branches: Sequence[Branch]) -> list[int]:
    """A selection that is wrong."""
    return [len(branches)]


def pick_from_the_end(branches: Sequence[Branch]) -> list[int]:
    """A selection that is wrong: the last branch, twice."""
    return [len(branches) - 1, -1]


async def test_a_selection_of_ones_own_chooses_branches():
    """What it leaves out is dropped by name, and masks follow its choice; one that is wrong is named."""
    paths = [f"{__name__}:{function.__name__}" for function in (pick_last, pick_what_is_not_there, pick_from_the_end)]
    async with serving(*says("one", "left", "right"), settings=ServerSettings(selections=tuple(paths))) as client:
        sessions = [await client.create(selection=path) for path in paths]
        for session in sessions:
            history = await ask(client, session, [SYSTEM, user("Go.")])
            for text in ("Left.", "Right."):
                await ask(client, session, [*history, user(text)])
        record, [sample] = await client.record(sessions[0]), await client.samples(sessions[0])
        wrong = [await client.http.get(f"/sessions/{each.session_id}/samples") for each in sessions[1:]]

    assert (sample["metadata"]["turns"], sample["weight"]) == ([0, 2], 1.0)
    assert record["ledger"]["dropped"] == {"other_sample": record["turns"][1]["output_length"]}
    assert sum(sample["loss_mask"]) == record["ledger"]["trained"]
    assert [each.status_code for each in wrong] == [400, 400]
    assert ["pick_what_is_not_there" in wrong[0].text, "0 to 1" in wrong[1].text] == [True, True]

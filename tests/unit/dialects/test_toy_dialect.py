"""A further dialect is two modules and a row: here `toy_request`, `toy_dialect`, and the row below."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from harness.dialects.dialect import DIALECTS, Dialect
from harness.engines.scripted import ScriptStep
from harness.rollouts.agents.agent_environment import agent_environment
from harness.rollouts.agents.task import AgentTask, ProgramAgent
from harness.rollouts.client.session_server import SessionHandle
from harness.server.admitted import TURN_ENDED
from harness.server.settings import ServerSettings
from tests.logged import capture_logs
from tests.session_servers.served import Client, Served, bearer, says, serving
from tests.unit.dialects.toy_dialect import ToyDialect

TABLE: tuple[Dialect, ...] = (*DIALECTS, ToyDialect())
RETRIES = {"x-stainless-retry-count": "1"}


@asynccontextmanager
async def toy_server(*steps: ScriptStep, **settings: Any) -> AsyncIterator[tuple[Client, Served]]:
    """A server that speaks the toy dialect beside its own, and a session on it."""
    async with serving(*steps, settings=ServerSettings(dialects=TABLE, **settings)) as client:
        yield client, await client.create()


async def ask(client: Client, session: Served, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    """A question in the toy dialect, at the session's base URL."""
    return await client.http.post(f"{session.base_url}/toy/questions", json=body, headers=headers)


def lines_of(stream: httpx.Response) -> tuple[list[Any], list[Any]]:
    """Keep-alives and the other events of a streamed answer."""
    events = [json.loads(line.removeprefix("data: ")) for line in stream.text.splitlines() if line]
    keep_alives = [event for event in events if "patience" in event]
    assert keep_alives == events[: len(keep_alives)] == [{"patience": i} for i in range(len(keep_alives))]
    return keep_alives, events[len(keep_alives) :]


async def test_a_question_is_answered_and_the_next_one_goes_on() -> None:
    """The turns are those of any dialect: exact prefixes of each other, and samples."""
    async with toy_server(*says("four", "six")) as (client, session):
        first = await ask(client, session, ask="2+2?")
        second = await ask(client, session, before=["2+2?", "four"], ask="3+3?", words=3)
        record = await client.record(session)
        [sample] = await client.samples(session)

    assert (first.status_code, first.json()) == (200, {"said": "four", "turn": 0})
    assert second.json() == {"said": "six", "turn": 1}
    assert [turn["parent"] for turn in record["turns"]] == [None, 0]
    assert record["turns"][1]["sampling"]["asked"] == {"max_new_tokens": 3}
    assert sample["metadata"]["turns"] == [0, 1]


async def test_a_key_is_enough_to_find_the_session() -> None:
    """At the root of the server, as for every dialect."""
    async with toy_server(*says("four")) as (client, session):
        answer = await client.http.post("/toy/questions", json={"ask": "2+2?"}, headers=bearer(session.api_key))

    assert answer.json() == {"said": "four", "turn": 0}


async def test_an_answer_is_streamed_after_keep_alives() -> None:
    """The server keeps the client patient; the parts are the dialect's."""
    async with toy_server(ScriptStep(text="yes", delay_s=0.1), comment_every_s=0.02) as (client, session):
        stream = await ask(client, session, ask="ready?", aloud=True)

    keep_alives, events = lines_of(stream)
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert keep_alives
    assert events == [{"letter": "y"}, {"letter": "e"}, {"letter": "s"}, {"turn": 0}]


async def test_a_retry_gets_the_answer_of_its_turn() -> None:
    """From the record, written again by the dialect."""
    async with toy_server(*says("four", "five")) as (client, session):
        first = await ask(client, session, ask="2+2?", aloud=True)
        retry = await ask(client, session, RETRIES, ask="2+2?", aloud=True)
        record = await client.record(session)

    assert first.content == retry.content
    assert len(record["turns"]) == 1


async def test_the_log_says_in_which_dialect_a_turn_was_asked_for() -> None:
    """On each of its lines."""
    with capture_logs() as logs:
        async with toy_server(*says("four", "six")) as (client, session):
            await ask(client, session, ask="2+2?")
            await client.say(session, [{"role": "user", "content": "3+3?"}])

    assert [line["dialect"] for line in logs if line["event"] == TURN_ENDED] == ["toy", "openai_chat"]


async def test_a_mistake_is_named_in_the_words_of_the_dialect() -> None:
    """Status and headers are the server's; a wrong method and a wrong base URL are told the same way."""
    async with toy_server() as (client, session):
        wrong = await ask(client, session, ask=3)
        other_method = await client.http.get(f"{session.base_url}/toy/questions")
        elsewhere = await client.http.post("/api/toy/questions", json={"ask": "2+2?"})
        chat = await client.chat(session, [])

    assert (wrong.status_code, wrong.headers["x-should-retry"]) == (400, "false")
    assert wrong.json() == {"sorry": "ask: Expected `str`, got `int`", "code": "invalid_request"}
    assert (other_method.status_code, other_method.json()["code"]) == (405, "method_not_allowed")
    assert (elsewhere.status_code, elsewhere.json()["code"]) == (404, "route_not_found")
    assert chat.json()["error"]["code"] == "invalid_request"


def test_an_agent_finds_its_session_by_the_variables_of_every_dialect() -> None:
    """Those of the table."""
    task = AgentTask(ProgramAgent("probe", ("probe",), {}), "Ask.", Path("/run/0"), "smollm2")
    session = SessionHandle("a1", "http://host:8000/sessions/a1", "sk-session")

    env = agent_environment(task.agent, task, session, {}, TABLE)

    assert (env["TOY_URL"], env["TOY_KEY"], env["TOY_MODEL"]) == (session.base_url, "sk-session", "smollm2")
    assert env["OPENAI_BASE_URL"] == f"{session.base_url}/v1"

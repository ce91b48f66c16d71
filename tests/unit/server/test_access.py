"""Who may ask what of a server with an admin token, and what an agent is told."""

import json

import httpx
import pytest

from harness.engines.base import LogprobScale
from harness.engines.remote.sglang import SGLangTokenProvider
from harness.server.serving import serve
from harness.server.settings import ServerSettings
from harness.server.store.base import MemoryStore
from tests.builders import toy_template, toy_tokenizer, user
from tests.fake_engines.fake_server import serving as serving_engine
from tests.fake_engines.fake_sglang import FakeSGLang
from tests.fake_engines.lies import Lie
from tests.fake_engines.providers import scripted_engine
from tests.logged import capture_logs
from tests.session_servers.served import Served, bearer, says, serving, url_of

LOCKED = ServerSettings(admin_token="sekret")
HI = [user("Hi.")]
BODY = {"messages": HI}


def stranger(url: str) -> httpx.AsyncClient:
    """Somebody who knows the address and nothing else."""
    return httpx.AsyncClient(base_url=url, timeout=30)


@pytest.mark.parametrize("header", ["authorization", "x-api-key", "x-goog-api-key"])
@pytest.mark.parametrize("path", ["/sessions/{id}/v1", "/v1"])
async def test_a_model_call_needs_the_key_of_its_session(header: str, path: str) -> None:
    """By path or by key alone, in any of the headers."""
    async with serving(*says("hello"), settings=LOCKED) as client, stranger(client.url) as agent:
        session = await client.create()
        key = f"Bearer {session.api_key}" if header == "authorization" else session.api_key
        base = path.format(id=session.session_id)
        answer = await agent.post(f"{base}/chat/completions", json=BODY, headers={header: key})
        models = await agent.get(f"{base}/models", headers={header: key})

    assert answer.json()["choices"][0]["message"]["content"] == "hello"
    assert (models.status_code, len(models.json()["data"])) == (200, 1)


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({}, 401, "unauthorized"),
        ({"authorization": "Basic abc"}, 401, "unauthorized"),
        (bearer("sk-harness-0"), 404, "session_not_found"),
        (bearer("sekret"), 404, "session_not_found"),
        ({"x-api-key": "of another session"}, 404, "session_not_found"),
    ],
)
async def test_whoever_has_no_key_of_it_does_not_learn_whether_there_is_a_session(
    headers: dict[str, str], status: int, code: str
) -> None:
    """One answer, that no client retries, for a session that lives, one that is gone, and one that never was."""
    async with serving(settings=LOCKED) as client, stranger(client.url) as agent:
        live, gone, other = [await client.create() for _ in range(3)]
        await client.http.delete(f"/sessions/{gone.session_id}")
        if "x-api-key" in headers:
            headers = {"x-api-key": other.api_key}
        paths = [url_of(each) for each in (live, gone, Served("f" * 32, "", ""))]
        answers = [await agent.post(path, json=BODY, headers=headers) for path in paths]
        record = await client.record(live)

    assert [(each.status_code, each.headers["x-should-retry"]) for each in answers] == [(status, "false")] * 3
    assert len({each.content for each in answers}) == 1
    assert answers[0].json()["error"]["code"] == code
    assert (record["turns"], record["refusals"]) == ([], {})


@pytest.mark.parametrize(
    "settings", [None, ServerSettings(open_paths=True), ServerSettings(admin_token="sekret", open_paths=True)]
)
async def test_an_operator_may_let_the_path_be_enough(settings: ServerSettings | None) -> None:
    """For agents that cannot be given a key; a server without an admin token is open in any case."""
    async with serving(*says("hello"), settings=settings) as client, stranger(client.url) as agent:
        answer = await agent.post(url_of(await client.create()), json=BODY)

    assert answer.status_code == 200


async def test_a_liveness_answer_says_nothing_and_asks_nobody() -> None:
    """It is the same for every path and for an engine that is down; the operator is told everything."""
    async with serving(settings=LOCKED) as client, stranger(client.url) as anybody:
        session = await client.create()
        health = await anybody.get("/health")
        looks = [
            await anybody.request(method, f"/sessions/{each}{rest}")
            for each in (session.session_id, "f" * 32)
            for method, rest in [("HEAD", ""), ("GET", "/"), ("GET", "/v1")]
        ]
        operators = (await client.http.get("/health")).json()

    assert (health.status_code, health.json()) == (200, {"status": "alive"})
    assert {look.status_code for look in looks} == {200}
    assert looks[1].text.replace(session.session_id, "f" * 32) == looks[4].text
    assert operators["engine"]["ready"]


async def test_an_agent_is_not_told_where_engines_are() -> None:
    """Neither whole nor streamed; the operator and the log have the address."""
    fake = FakeSGLang(scripted_engine())
    settings = ServerSettings(admin_token="sekret", engine_attempts=1)
    async with fake.engine, serving_engine(fake, notices_disconnects=False):
        engine = SGLangTokenProvider(
            fake.url, vocab_size=toy_tokenizer().vocab_size, logprob_scale=LogprobScale.AFTER_TEMPERATURE
        )
        async with serve(engine, toy_template(), MemoryStore(), settings) as running, stranger(running.url) as http:
            created = (await http.post("/sessions", json={}, headers=bearer("sekret"))).json()
            session = Served(**created)
            fake.lie = Lie.STATUS_503
            with capture_logs() as logs:
                answers = [
                    await http.post(url_of(session), json=BODY | more, headers=bearer(session.api_key))
                    for more in ({}, {"stream": True})
                ]
            health = await http.get("/health")

    address = fake.url.removeprefix("http://")
    assert [answer.status_code for answer in answers] == [503, 503]
    assert all(address not in answer.text for answer in (*answers, health))
    assert answers[0].json()["error"]["message"] == "no engine is reachable, or none accepts requests now; retry later"
    assert address in json.dumps([line for line in logs if line["event"] == "request_refused"])


@pytest.mark.parametrize("settings", [None, LOCKED])
async def test_no_log_holds_a_key_a_prompt_or_what_opens_a_session(settings: ServerSettings | None) -> None:
    """Of a server without keys the id of a session is enough; of any, clients write all of it where they should not."""
    with capture_logs() as logs:
        async with serving(*says("hello"), settings=settings) as client:
            sessions = [await client.create() for _ in range(3)]
            session, other, gone = sessions
            headers = bearer(session.api_key)
            await client.chat(session, [user("PROMPT")])
            await client.chat(session, [{"role": "PROMPT", "content": "PROMPT"}])
            await client.chat(session, HI, tool_choice={"type": "function", "function": {"name": "PROMPT"}})
            await client.http.delete(f"/sessions/{gone.session_id}")
            await client.chat(gone, HI)
            for secret in (session.session_id, session.api_key, other.session_id.upper()):
                for path in (f"/sessions/{secret}/v2", f"/{secret}", f"/v1/{secret}?key={secret}"):
                    await client.http.post(path, json=BODY, headers=headers)
                await client.http.post(f"/sessions/{secret}/v1/chat/completions", json=BODY, headers=bearer(secret))
            await client.http.post("/sessions/drain")
            await client.chat(session, HI)
            await client.samples(session)

    said = json.dumps(logs, default=str).lower()
    assert "request_refused" in said
    secrets = [secret for each in sessions for secret in (each.session_id, each.api_key)]
    assert not [secret for secret in (*secrets, "prompt", "sekret") if secret in said]

"""Routes, identity and refusals: every answer is JSON, and what is refused changes nothing."""

import asyncio

import httpx
import pytest

from harness.cli.options import ServerOptions
from harness.dialects.request_limits import RequestLimits
from harness.errors import EngineConnectionLost, EngineError, EngineReplyInvalid, HarnessError, ScenarioError
from harness.samples.codec import samples_from_tensors
from harness.server.http.responses import error_response
from harness.server.settings import ServerSettings
from tests.builders import body, user
from tests.session_servers.served import bearer, says, serving, session_on, url_of
from tests.session_servers.store_file import NONE_UNKNOWN

HI = [user("hi")]


async def test_a_session_is_created_with_id_url_and_key(client):
    """32 hex digits; the URL ends in the session's prefix, as agents are pointed to it."""
    answer = (await client.http.post("/sessions")).json()

    assert len(bytes.fromhex(answer["session_id"])) == 16
    assert answer["base_url"] == f"{client.url}/sessions/{answer['session_id']}"
    assert set(answer) == {"session_id", "base_url", "api_key"}


async def test_an_id_that_was_used_before_is_not_given_again(tmp_path):
    """The file still has the closed session; its rows stay its own."""
    chosen = {"session_id": "0123456789abcdef" * 2}
    async with serving(store=tmp_path / "s.db") as client:
        await client.http.post("/sessions", json=chosen)
        await client.http.delete(f"/sessions/{chosen['session_id']}")
        refused = await client.http.post("/sessions", json=chosen)
        other = await client.http.post("/sessions")

    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "session_exists")
    assert (refused.headers["x-should-retry"], other.status_code) == ("false", 200)


async def test_a_public_url_is_what_agents_are_told():
    """Behind another name, the base URL is that name."""
    async with session_on(settings=ServerSettings(public_url="https://gateway/h/")) as (_, session):
        pass
    assert session.base_url == f"https://gateway/h/sessions/{session.session_id}"


def test_a_public_url_is_an_address():
    """Agents could not use another one; `harness serve --public-url` ends with this line."""
    with pytest.raises(ScenarioError, match=r"public_url: expected an address that begins with http\(s\)://, got 'x'"):
        ServerOptions(public_url="x").settings()

    assert ServerOptions(public_url="https://gateway").settings().public_url == "https://gateway"


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_the_prefix_answers_agents_that_look_first(client, method):
    """Some agents ask for the base URL, or for `/api/hello`, before they begin."""
    base = f"/sessions/{(await client.create()).session_id}"
    paths = ["", "/", "/v1", *(["/api/hello"] if method == "HEAD" else [])]
    answers = [await client.http.request(method, f"{base}{path}") for path in paths]

    assert {(each.status_code, each.headers["content-type"]) for each in answers} == {(200, "application/json")}
    assert {bool(each.content) for each in answers} == {method == "GET"}


@pytest.mark.parametrize("prefix", ["", "/sessions/{id}"])
async def test_the_model_is_listed(prefix):
    """By its name, in the form that clients parse."""
    async with session_on(settings=ServerSettings(model="my-model")) as (client, session):
        answer = await client.http.get(prefix.format(id=session.session_id) + "/v1/models")

    assert [card["id"] for card in answer.json()["data"]] == ["my-model"]


async def test_health_and_metrics(client, session):
    """What operators and dashboards read."""
    await client.say(session, HI)
    await client.chat(session, [])
    health = await client.http.get("/health")
    metrics = (await client.http.get("/metrics")).text

    assert health.json()["engine"] == health.json()["engine"] | {"name": "scripted", "ready": True, "running": 0}
    assert (health.status_code, health.json()["status"], health.json()["gate"]) == (200, "ok", "open")
    assert 'harness_turns_total{status="completed"} 1.0' in metrics
    assert 'harness_errors_total{code="invalid_request"} 1.0' in metrics
    assert "harness_turns_in_flight 0.0" in metrics
    assert "harness_sessions_open 1.0" in metrics


UNKNOWN = ["/", "/nope", "/sessions/", "/v1/chat", "/v1/chat/completions/", "/sessions/x/v1/completions", "/../etc"]
UNKNOWN += ["/%00%ff/%F0%9F%98%80/" + "x" * 5_000]


async def test_an_unknown_route_is_json(client):
    """Agents parse answers: never HTML, never a redirect, and short however odd the path is."""
    answers = [await client.http.request(method, path) for path in UNKNOWN for method in ("GET", "POST", "PUT")]

    assert {(answer.status_code, answer.headers["content-type"]) for answer in answers} == {(404, "application/json")}
    assert {answer.json()["error"]["code"] for answer in answers} == {"route_not_found"}
    assert max(len(answer.content) for answer in answers) < 1_000
    assert {answer.headers["x-should-retry"] for answer in answers} == {"false"}


async def test_an_unknown_session_has_an_empty_record_and_no_turns(client):
    """Collecting what was reclaimed must not crash a rollout; a turn on it is terminal."""
    unknown = "0" * 32
    record = (await client.http.get(f"/sessions/{unknown}")).json()
    samples = (await client.http.get(f"/sessions/{unknown}/samples")).json()
    facts = (await client.http.get(f"/sessions/{unknown}/facts")).json()
    packed = await client.http.get(f"/sessions/{unknown}/samples?format=safetensors")
    ended = await client.http.post(f"/sessions/{unknown}/end")
    turn = await client.http.post(f"/sessions/{unknown}/v1/chat/completions", json={"messages": HI})

    assert (record["session_id"], record["phase"], record["turns"], samples) == (
        unknown,
        "unknown",
        [],
        {"samples": []},
    )
    assert record["ledger"] == {"generated": 0, "trained": 0, "masked": 0, "dropped": {}, "unknown": NONE_UNKNOWN}
    assert (facts["phase"], facts["turns_in_flight"], facts["turns"]) == ("unknown", 0, {})
    tensors, about = samples_from_tensors(packed.content)
    assert (tensors, about["facts"], about["session"]["phase"]) == ([], facts, "unknown")
    assert (ended.status_code, ended.json()["phase"], ended.json()["turns_in_flight"]) == (200, "unknown", 0)
    assert (turn.status_code, turn.json()["error"]["code"]) == (404, "session_not_found")
    assert turn.headers["x-should-retry"] == "false"


async def test_deleting_is_idempotent_and_final(client, session):
    """204 as often as it is asked; the record is empty, turns are terminal."""
    await client.say(session, HI)
    statuses = [(await client.http.delete(f"/sessions/{session.session_id}")).status_code for _ in range(3)]
    record = await client.record(session)
    turn = await client.chat(session, HI)

    assert (statuses, record["turns"], turn.status_code) == ([204] * 3, [], 404)


ADMIN = [
    ("POST", "/sessions"),
    ("GET", "/sessions"),
    ("GET", "/sessions/{id}"),
    ("GET", "/sessions/{id}/samples"),
    ("DELETE", "/sessions/{id}"),
    ("POST", "/sessions/drain"),
    ("POST", "/sessions/pause"),
    ("POST", "/sessions/resume"),
    ("GET", "/sessions/gate"),
    ("GET", "/sessions/holds"),
    ("GET", "/sessions/times"),
    ("GET", "/metrics"),
    ("POST", "/sessions/{id}/drain"),
    ("GET", "/sessions/server"),
]


NOT_THE_TOKEN = [
    {},
    {"authorization": "Bearer wrong"},
    {"authorization": "Bearer sekret-nearly"},
    {"authorization": "Bearer"},
    {"authorization": "Basic sekret"},
    {"x-api-key": ""},
    {"authorization": "Bearer ünïcode".encode()},
]


@pytest.mark.parametrize(("method", "path"), ADMIN)
async def test_admin_verbs_need_the_admin_token(method, path):
    """Neither nothing nor something like it, nor the key of the session: 401, and nothing happens."""
    async with (
        serving(settings=ServerSettings(admin_token="sekret")) as client,
        httpx.AsyncClient(base_url=client.url, timeout=30) as stranger,
    ):
        session = await client.create()
        url, keys = path.format(id=session.session_id), [*NOT_THE_TOKEN, bearer(session.api_key)]
        refused = [await stranger.request(method, url, headers=headers) for headers in keys]
        listed = (await client.http.get("/sessions")).json()["sessions"]
        gate = await client.gate()
        allowed = await client.http.request(method, url)

    assert [answer.status_code for answer in refused] == [401] * len(keys)
    assert {answer.json()["error"]["code"] for answer in refused} == {"unauthorized"}
    assert ([line["phase"] for line in listed], gate["epoch"]) == (["open"], 0)
    assert allowed.status_code in (200, 204)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.com", ""])
async def test_an_open_server_without_a_token_is_refused(host):
    """Binding to the network needs a token; nothing is bound before that is known."""
    with pytest.raises(ScenarioError, match="admin token"):
        async with serving(settings=ServerSettings(host=host)):
            pytest.fail("it was served")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_loopback_needs_no_token(host):
    """A machine of one's own."""
    ServerSettings(host=host).check()


async def test_a_port_in_use_is_a_sentence(client):
    """Not a traceback, and no group of exceptions."""
    port = int(client.url.rpartition(":")[2])
    with pytest.raises(HarnessError, match=f"cannot listen on 127.0.0.1:{port}"):
        async with serving(settings=ServerSettings(port=port)):
            pytest.fail("it was served")


async def test_an_exception_in_the_block_comes_out_as_itself():
    """A program that embeds the server catches what it raised."""
    with pytest.raises(KeyError):
        async with serving():
            raise KeyError("mine")


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_is_too_large_is_refused_as_soon_as_it_is_known(chunked):
    """Declared or not: 413 in the OpenAI form, state unchanged, and the server continues."""
    large = body([user("x" * 3_000_000)])

    async def pieces():
        for start in range(0, len(large), 65_536):
            yield large[start : start + 65_536]

    small = ServerSettings(limits=RequestLimits(body_bytes=100_000))
    async with session_on(*says("hello"), settings=small) as (client, session):
        try:
            answer = await client.http.post(url_of(session), content=pieces() if chunked else large)
        except httpx.WriteError:  # the server answered and hung up while the client was still sending
            answer = None
        record = await client.record(session)
        next_turn = await client.chat(session, HI)

    assert answer is None or (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert (record["turns"], next_turn.status_code) == ([], 200)


async def test_a_client_that_leaves_while_sending_harms_nobody(client, session):
    """Half a body, then silence: no turn, and the server continues."""
    host, _, port = client.url.removeprefix("http://").partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"POST {url_of(session)} HTTP/1.1\r\nhost: h\r\ncontent-length: 1000\r\n\r\n{{".encode())
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    next_turn = await client.chat(session, HI)
    record = await client.record(session)

    assert (next_turn.status_code, len(record["turns"])) == (200, 1)


@pytest.mark.parametrize(("kind", "may_retry"), [(EngineConnectionLost, True), (EngineReplyInvalid, False)])
def test_a_client_retries_an_engine_that_may_do_better_next_time(kind: type[EngineError], may_retry: bool) -> None:
    """Every one is 502, which clients retry unless the header says that it is in vain."""
    answer = error_response(kind("so it was"), to_agent=True)

    assert (answer.status_code, answer.headers.get("x-should-retry")) == (502, None if may_retry else "false")


async def test_an_address_that_a_client_states_for_itself_is_not_believed(client):
    """Whoever reaches the port may send these; the base URL is that of the server, or the one that its operator set."""
    stated = {"x-forwarded-proto": "https", "x-forwarded-for": "10.0.0.1", "x-forwarded-host": "evil.example"}
    answer = await client.http.post("/sessions", headers=stated)

    assert answer.json()["base_url"].startswith(client.url)

"""Sessions and the router at one URL: which path is whose, what needs the admin token, what is said of workers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

import harness.gateway.router.gateway_program as gateway_program_module
from harness.errors import LaneError, ScenarioError
from harness.gateway.router.gateway_program import GatewayProgram, gateway_program
from harness.gateway.router.routed import Routed, RoutedApp, RouterSettings, open_routed
from harness.server.registry import API_KEY_PREFIX
from harness.server.serving import serve
from harness.server.settings import ServerSettings
from harness.server.store.memory import MemoryStore
from tests.builders import toy_template
from tests.fake_engines.lies import Lie
from tests.fake_engines.providers import toy_tokenizer
from tests.fake_engines.workers import PATIENCE_S, FakeGateway, fake_workers, serving_app
from tests.session_servers.scripted import SAY_NOTHING, canned_server
from tests.session_servers.served import eventually

CREDENTIALS = (b"authorization", b"x-api-key", b"x-goog-api-key")
KEY = {"authorization": f"Bearer {API_KEY_PREFIX}abc"}
CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "Hi."}]}
TOKEN = {"authorization": "Bearer secret"}


def saying(name: str) -> ASGIApp:
    """An application that says who it is and what it was asked."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": f"{name} {scope['path']}".encode()})

    return app


@asynccontextmanager
async def routed_by(
    settings: RouterSettings, program: GatewayProgram | None = None, **options: Any
) -> AsyncIterator[tuple[Routed, httpx.AsyncClient]]:
    """A router at the URL of sessions that are not there, its pool entered, and a client with the admin token."""
    async with (
        open_routed(settings, program, vocab_size=toy_tokenizer().vocab_size, **options) as routed,
        routed.pool,
        serving_app(RoutedApp(saying("sessions"), routed.front, admin_token=options.get("admin_token"))) as url,
        httpx.AsyncClient(base_url=url, headers=TOKEN, timeout=PATIENCE_S) as http,
    ):
        yield routed, http


def client(admin_token: str | None = None) -> httpx.AsyncClient:
    """Both at one URL."""
    app = RoutedApp(saying("sessions"), saying("router"), admin_token=admin_token)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router")


@pytest.mark.parametrize(
    ("path", "headers", "answered"),
    [
        ("/sessions", {}, "sessions /sessions"),
        ("/sessions/drain", {}, "sessions /sessions/drain"),
        ("/sessions/ab/v1/chat/completions", {}, "sessions /sessions/ab/v1/chat/completions"),
        ("/v1/chat/completions", KEY, "sessions /v1/chat/completions"),
        ("/v1/messages", {"x-api-key": f"{API_KEY_PREFIX}abc"}, "sessions /v1/messages"),
        ("/v1beta/models/m:x", {"x-goog-api-key": f"{API_KEY_PREFIX}abc"}, "sessions /v1beta/models/m:x"),
        ("/v1/chat/completions", {}, "router /v1/chat/completions"),
        ("/v1/chat/completions", {"authorization": "Bearer sk-somebody-else"}, "router /v1/chat/completions"),
        ("/router/health", {}, "sessions /health"),
        ("/router/metrics", {}, "sessions /metrics"),
        ("/router", {}, "router /router"),
        ("/health", {}, "router /health"),
        ("/sessionsand", {}, "router /sessionsand"),
        ("/generate", KEY, "router /generate"),
    ],
)
async def test_a_path_belongs_to_sessions_or_to_the_router(path: str, headers: dict[str, str], answered: str) -> None:
    """Clients of an SGLang router find everything where it was."""
    async with client() as http:
        assert (await http.post(path, headers=headers)).text == answered


async def test_with_an_admin_token_the_router_needs_it() -> None:
    """Sessions check their own credentials; whoever has only a session's key must not pause every worker."""
    async with client("secret") as http:
        refused = [await http.post(path, headers=KEY) for path in ("/pause_generation", "/generate", "/router")]
        assert [answer.status_code for answer in refused] == [401, 401, 401]
        assert refused[0].json()["error"]["code"] == "unauthorized"
        assert (await http.post("/pause_generation", headers=TOKEN)).text == "router /pause_generation"
        assert (await http.post("/sessions/ab")).text == "sessions /sessions/ab"


@pytest.mark.parametrize(
    ("admin_token", "sent", "passed"),
    [
        ("secret", {"authorization": "Bearer secret"}, []),
        ("secret", {"x-api-key": "secret"}, []),
        ("secret", {"authorization": "Bearer secret", "x-api-key": "of-the-gateway"}, []),
        (None, KEY, []),
        (None, {"x-api-key": f"{API_KEY_PREFIX}abc"}, []),
        (None, {"x-goog-api-key": f"{API_KEY_PREFIX}abc"}, []),
        (None, {"authorization": "Bearer of-the-gateway"}, ["authorization"]),
    ],
)
async def test_credentials_of_ours_end_at_the_router(
    admin_token: str | None, sent: dict[str, str], passed: list[str]
) -> None:
    """Neither the gateway nor a worker learns the admin token or the key of a session."""
    seen: list[str] = []

    async def router(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend(name.decode() for name, _ in scope["headers"] if name in CREDENTIALS)
        await saying("router")(scope, receive, send)

    app = RoutedApp(saying("sessions"), router, admin_token=admin_token)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as http:
        assert (await http.post("/generate", headers=sent)).text == "router /generate"

    assert seen == passed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (RouterSettings(), "either --worker-urls"),
        (RouterSettings(worker_urls=("http://a",), router_url="http://b"), "either --worker-urls"),
        (RouterSettings(worker_urls=("127.0.0.1:30000",)), "expected an address such as"),
    ],
)
def test_a_command_line_that_means_no_gateway_is_refused(settings: RouterSettings, message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        settings.check()


async def test_a_gateway_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ScenarioError, match="no gateway 'nginx'; expected one of smg, sglang-router"):
        await gateway_program("nginx", print)


async def test_an_installation_that_hangs_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By an index that does not answer; no sandboxes are left behind."""
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path))
    monkeypatch.setattr(gateway_program_module, "_INSTALL_S", 0.001)

    async with canned_server(SAY_NOTHING) as index:
        monkeypatch.setenv("UV_DEFAULT_INDEX", index.url)
        monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
        with pytest.raises(LaneError, match=r"`uv (venv|pip install) .*` did not end within 0\.001 s; .* try again"):
            await gateway_program("smg", print)
    assert [path.suffix for path in (tmp_path / "gateways").iterdir()] == [".lock"]


async def test_every_worker_is_asked_with_its_own_key(
    smg: GatewayProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By sessions, verbs and the gateway; no answer shows a key."""
    monkeypatch.setenv("KEY_A", "k3y-of-a")
    async with fake_workers("sglang", "sglang") as [a, b]:
        a.api_key, b.api_key = "k3y-of-a", "k3y-of-all"
        urls = (f"{a.url}#key=KEY_A", b.url)
        settings = RouterSettings(worker_urls=urls, engine_key="k3y-of-all", interval_s=0.05)
        async with routed_by(settings, smg, admin_token="secret") as (routed, http):
            async with asyncio.timeout(PATIENCE_S):
                while len((listed := await http.get("/workers")).json()["workers"]) < 2 or len(routed.pool.workers) < 2:
                    await asyncio.sleep(0.05)
            chats = [await http.post("/v1/chat/completions", json=CHAT) for _ in range(4)]
            flushed = await http.post("/flush_cache")
            about = await http.get("/router")
        shown = f"{listed.text} {about.text} {flushed.text} {settings!r}"

    assert {answer.status_code for answer in (*chats, flushed)} == {200}
    assert set(a.keys) <= {"Bearer k3y-of-a", ""}
    assert set(b.keys) <= {"Bearer k3y-of-all", ""}
    assert "k3y" not in shown


async def test_a_gateway_that_runs_already_gets_the_key_that_its_address_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWAY_KEY", "k3y")
    gateway = FakeGateway()
    async with fake_workers("sglang") as [worker], serving_app(gateway) as upstream:
        gateway.listed = [worker.url]
        settings = RouterSettings(router_url=f"{upstream}#key=GATEWAY_KEY", interval_s=0.05)
        async with routed_by(settings, admin_token="secret") as (_, http):
            await http.post("/v1/chat/completions", json=CHAT)

    assert set(gateway.keys) == {"Bearer k3y"}


async def test_a_session_server_that_is_a_router_too_lets_operators_alone_turn_its_workers() -> None:
    """As `harness router` puts both together; the gateway never sees the admin token."""
    gateway = FakeGateway()
    async with fake_workers("sglang") as [worker], serving_app(gateway) as upstream:
        gateway.listed = [worker.url]
        settings = RouterSettings(router_url=upstream, interval_s=0.05)
        async with (
            open_routed(settings, None, vocab_size=toy_tokenizer().vocab_size, admin_token="secret") as routed,
            serve(
                routed.pool, toy_template(), MemoryStore(), ServerSettings(admin_token="secret"), around=routed.around
            ) as running,
            httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as http,
        ):
            answers = [await http.post("/flush_cache", headers=headers) for headers in ({}, KEY, TOKEN)]
            await http.post("/v1/chat/completions", json=CHAT, headers=TOKEN)

    assert [answer.status_code for answer in answers] == [401, 401, 200]
    assert worker.paths.count("/flush_cache") == 1
    assert set(gateway.keys) == {""}


async def test_a_worker_that_has_not_proven_the_guard_silences_its_signal() -> None:
    """The gateway may send a request to it, and a 0 in its answer would be a guess; why it was refused is said."""
    gateway = FakeGateway()
    async with fake_workers("sglang", "sglang") as [proven, refused], serving_app(gateway) as upstream:
        gateway.listed, refused.lie = [proven.url], Lie.STATUS_503
        settings = RouterSettings(router_url=upstream, interval_s=0.05)
        async with routed_by(settings, is_guarded=True) as (_, http):
            signaled = (await http.post("/v1/chat/completions", json={})).json()
            gateway.listed.append(refused.url)
            async with asyncio.timeout(PATIENCE_S):
                while not (reasons := (await http.get("/router")).json()["sessions"]["refused"]):
                    await asyncio.sleep(0.01)
            silent = (await http.post("/v1/chat/completions", json={})).json()

    assert (signaled.keys(), silent.keys()) == ({"choices", "harness"}, {"choices"})
    assert "503" in reasons[refused.url]


@pytest.mark.parametrize("mode", ["nap", ["abort"]])
async def test_a_pause_that_means_nothing_ends_no_pause(mode: object) -> None:
    """A worker that joins afterwards is paused like the others."""
    gateway = FakeGateway()
    async with fake_workers("sglang", "sglang") as [first, late], serving_app(gateway) as upstream:
        gateway.listed = [first.url]
        settings = RouterSettings(router_url=upstream, interval_s=0.05)
        async with routed_by(settings) as (routed, http):
            for each in ("abort", mode):
                assert (await http.post("/pause_generation", json={"mode": each})).status_code in (200, 502)
            gateway.listed.append(late.url)
            await eventually(lambda: len(routed.pool.workers) == 2)

            assert "/pause_generation" in late.paths

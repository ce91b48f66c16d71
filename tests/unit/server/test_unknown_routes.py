"""What is no route of a session server, as its operator sees it."""

import httpx
import pytest

from harness.engines.scripted import ScriptStep
from harness.server.http.responses import MAX_PATTERNS, OTHER, UnknownRoutes
from tests.logged import capture_logs
from tests.session_servers.scripted import scripted_server


async def test_an_agent_with_another_dialect_is_seen():
    """Each request is counted, each route told once, whichever session asks for it."""
    with capture_logs() as logs:
        async with (
            scripted_server(ScriptStep(text="Hello.")) as server,
            httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=30) as http,
        ):
            for session in ("a", "b", "c"):
                assert (await http.post(f"/sessions/{session}/v1/embeddings", json={})).status_code == 404
            assert (await http.post("/sessions/a/v1/completions", json={})).status_code == 404
            assert (await http.get("/sessions/a/v1/chat/completions")).status_code == 405
            metrics = (await http.get("/metrics")).text

    assert 'harness_unknown_routes_total{dialect="other"} 4.0' in metrics
    assert 'harness_unknown_routes_total{dialect="openai_chat"} 1.0' in metrics
    told = [(line["event"], line["route"]) for line in logs if "route" in line]
    assert told == [
        ("route_not_found", "POST /sessions/{id}/v1/embeddings"),
        ("route_not_found", "POST /sessions/{id}/v1/completions"),
        ("method_not_allowed", "GET /sessions/{id}/v1/chat/completions"),
    ]
    assert 'harness_errors_total{code="route_not_found"} 4.0' in metrics
    assert 'harness_errors_total{code="method_not_allowed"} 1.0' in metrics


def test_whoever_invents_routes_is_told_of_only_so_often():
    """Neither the log nor the memory grows with them."""
    routes = UnknownRoutes()
    told = [routes.note("GET", f"/{number}{'x' * 5000}") for number in range(10 * MAX_PATTERNS)]

    seen = [pattern for pattern in told if pattern is not None]
    assert (len(seen), seen[-1]) == (MAX_PATTERNS + 1, OTHER)
    assert max(map(len, seen)) < 300


@pytest.mark.parametrize("path", ["", "/", "//", "/sessions", "/sessions/", "/sessions//v1"])
def test_any_path_has_a_pattern(path: str):
    """Odd ones, too."""
    assert (UnknownRoutes().note("GET", path) or "").startswith("GET /")

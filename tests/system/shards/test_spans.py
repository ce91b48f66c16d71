"""Spans of shards."""

from pathlib import Path

import pytest

from tests.builders import user
from tests.otlp_collector import collecting
from tests.session_servers.served import Served, bearer
from tests.shard_fleet import ShardFleet


async def test_every_shard_sends_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With the headers that the environment has for all of them."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=two")
    async with collecting() as collector:
        places: set[str] = set()
        async with ShardFleet(tmp_path, "--otlp", collector.url) as fleet, fleet.client() as http:
            while len(places) < 2:
                session = Served(**(await http.post("/sessions", json={})).json())
                places.add(session.base_url.rpartition("/sessions")[0])
                body = {"model": "m", "messages": [user("Begin.")]}
                answer = await http.post(
                    f"{session.base_url}/v1/chat/completions", json=body, headers=bearer(session.api_key)
                )
                assert answer.status_code == 200, answer.text
    assert {each["x-tenant"] for each in collector.headers} == {"two"}
    names = [span.name for span in collector.spans.values()]
    assert names.count("session") == names.count("turn") >= 2

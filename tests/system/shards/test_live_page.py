"""The live page of a front of shards: what all of them have, and what of it stays while one is being started again."""

import asyncio
from pathlib import Path
from typing import Any

import httpx

from harness.types import Json
from harness.viewer.live.live_page import serve_live
from tests.builders import user
from tests.shard_fleet import ShardFleet

EMPTY = {"version": 0, "texts": 0, "record": 0}


async def test_a_front_is_looked_at_as_one_server(tmp_path: Path):
    """Sessions, times and records of its shards, its own gate; a shard that is killed takes no session along."""
    async with (
        ShardFleet(tmp_path) as fleet,
        fleet.client() as http,
        serve_live(fleet.address, None) as page,
        httpx.AsyncClient(base_url=page.url, timeout=60) as browser,
    ):

        async def look(**asked: Any) -> Json:
            told: Json = (await browser.get("changes", params={**EMPTY, "open": "", **asked})).json()
            return told

        sessions = [(await http.post("/sessions", json={})).json() for _ in range(4)]
        for session in sessions:
            await http.post(
                f"{session['base_url']}/v1/chat/completions",
                json={"messages": [user("Hello.")]},
                headers={"authorization": f"Bearer {session['api_key']}"},
            )
        for name in ("pause", "resume"):
            await http.post(f"/sessions/{name}", json={"holder": "trainer"})
        told = await look(open=sessions[0]["session_id"])
        other = await look(open=sessions[1]["session_id"])
        async with asyncio.timeout(60):
            while not (later := await look())["facts"]["problems"]:
                fleet.kill_shard(0)  # it is back within a second, and nobody may have looked
                await asyncio.sleep(0.2)
        await fleet.serves()
        async with asyncio.timeout(60):
            while (back := await look())["facts"]["problems"] or back["problem"]:
                await asyncio.sleep(0.2)

    ids = {session["session_id"] for session in sessions}
    for each in (told, later, back):
        assert {line["id"] for line in each["sessions"]} == ids
        assert not any(line["is_gone"] for line in each["sessions"])
    assert [len(line["times"]) for line in told["sessions"]] == [1] * 4
    assert [(band["kind"], band["words"]) for band in told["bands"]] == [("pause", "by trainer")]
    for each in (told, other):
        assert [turn["status"] for turn in each["session"]["turns"]] == ["completed"]
    assert "shard 0" in later["facts"]["problems"][0]

"""A session whose rows are damaged is kept aside: the server starts, others are served, its id says so."""

import sqlite3
from contextlib import closing
from pathlib import Path

from tests.builders import user
from tests.session_servers.served import serving


async def test_a_damaged_session_costs_nobody_else_anything(tmp_path: Path) -> None:
    """It is named in the list, counted in `/health` and `/metrics`; whoever asks for it is refused by name."""
    store = tmp_path / "sessions.db"
    async with serving(store=store) as client:
        damaged, sound = await client.create(), await client.create()
        for session in (damaged, sound):
            await client.say(session, [user("hello")])
    with closing(sqlite3.connect(store)) as connection:
        connection.execute("UPDATE turns SET output_ids = x'01' WHERE session_id = ?", (damaged.session_id,))
        connection.commit()

    async with serving(store=store) as client:
        path = f"/sessions/{damaged.session_id}"
        answers = [
            await client.chat(damaged, [user("hello")]),
            await client.http.post(
                "/v1/chat/completions",
                json={"messages": [user("hello")]},
                headers={"authorization": f"Bearer {damaged.api_key}"},
            ),
            await client.http.get(path),
            await client.http.get(f"{path}/samples"),
            await client.http.post("/sessions", json={"resumes": damaged.session_id}),
        ]
        served = await client.chat(sound, [user("hello")])
        [listed] = (await client.http.get("/sessions")).json()["quarantined"]
        health = await client.http.get("/health")
        metrics = (await client.http.get("/metrics")).text
        deleted = [await client.http.delete(path) for _ in "12"]
        after = (await client.http.get("/health")).json()["store"]["quarantined"]
    async with serving(store=store) as client:
        again = (await client.http.get("/health")).json()["store"]["quarantined"]

    assert client.restored == 1
    assert [(each.status_code, each.json()["error"]["code"]) for each in answers] == [(404, "session_damaged")] * 5
    assert {each.headers["x-should-retry"] for each in answers} == {"false"}
    assert served.status_code == 200
    assert (listed["session_id"], "buffer" in listed["reason"]) == (damaged.session_id, True)
    assert (health.status_code, health.json()["store"]["quarantined"]) == (200, 1)
    assert "harness_sessions_quarantined 1.0" in metrics
    assert [each.status_code for each in deleted] == [204, 204]
    assert (after, again) == (0, 0)

"""The sessions of a run on somebody else's server are noted before they exist."""

import secrets
from pathlib import Path

import pytest

from harness.errors import SessionServerError
from harness.rollouts.client.connections import SessionServerAddress
from harness.rollouts.client.session_server import Deadlines
from harness.suite.record.attached_sessions import AttachedSessions
from harness.suite.run.attached import AttachedClient
from tests.fake_engines.fake_server import Fault
from tests.fake_engines.faulty_proxy import proxied
from tests.session_servers.served import serving

HASTY = Deadlines(create_s=5, attempt_s=5, read_s=5, end_s=1, delete_s=2)


async def test_a_session_is_found_again_although_nobody_heard_that_there_is_one(tmp_path: Path):
    """As after a `kill -9` between the creation and its answer: whoever continues with the run deletes it."""
    async with serving() as client, proxied(client.url) as proxy:
        proxy.faults["/sessions"] = [Fault.LOST]
        with AttachedSessions(tmp_path / "run.db") as noted:
            async with AttachedClient(SessionServerAddress(proxy.url), noted, HASTY) as run:
                with pytest.raises(SessionServerError):
                    await run.create({})
        created = [session.session_id for session in client.server.sessions]
        with AttachedSessions(tmp_path / "run.db") as noted:
            uncounted = noted.list_uncounted()
            async with AttachedClient(SessionServerAddress(client.url), noted, HASTY) as run:
                missing = await run.delete_abandoned_sessions()
            left = noted.list_uncounted()

        assert uncounted == created
        assert len(created) == 1
        assert (missing, left, list(client.server.sessions)) == (0, [], [])


async def test_a_session_that_was_refused_is_not_noted(tmp_path: Path):
    """There is none that anybody would have to look for."""
    async with serving() as client:
        with AttachedSessions(tmp_path / "run.db") as noted:
            async with AttachedClient(SessionServerAddress(client.url), noted, HASTY) as run:
                with pytest.raises(SessionServerError, match="matching"):
                    await run.create({"matching": ["nonsense"]})

            assert noted.list_uncounted() == []


async def test_two_sessions_cannot_have_one_id():
    """The one that has it stays as it is."""
    chosen = "0123456789abcdef" * 2
    async with serving() as client:
        first = await client.http.post("/sessions", json={"session_id": chosen})
        second = await client.http.post("/sessions", json={"session_id": chosen})
        nonsense = await client.http.post("/sessions", json={"session_id": "../etc/passwd"})
        held = [session.api_key for session in client.server.sessions]

    assert (first.json()["session_id"], held) == (chosen, [first.json()["api_key"]])
    for refused in (second, nonsense):
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "session_id")


async def test_a_creation_that_met_a_drain_is_made_again_under_another_id(tmp_path: Path, monkeypatch):
    """The server has closed the session of that id by then, and takes it from nobody else."""
    met, new = "0123456789abcdef" * 2, secrets.token_hex
    ids = iter([met])
    monkeypatch.setattr(secrets, "token_hex", lambda size: next(ids, None) or new(size))
    async with serving(store=tmp_path / "server.db") as client:
        await client.http.post("/sessions", json={"session_id": met})
        await client.http.delete(f"/sessions/{met}")
        ids = iter([met[:2], met[2:]])
        with AttachedSessions(tmp_path / "run.db") as noted:
            async with AttachedClient(SessionServerAddress(client.url), noted, HASTY) as run:
                session = await run.create({})

            assert noted.list_uncounted() == [session.session_id] != [met]

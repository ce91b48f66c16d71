"""`harness ctl` and `harness sessions`: a person at a server that runs, beside the programs that use it."""

import asyncio
import getpass
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from harness.engines.scripted import ScriptedEngine
from harness.errors import StoreError
from harness.rollouts.client.session_server import SessionServerClient
from harness.server.serving import RunningServer, serve
from harness.server.store.base import MemoryStore
from harness.sessions.paging import SessionStub
from harness.sessions.session import Session
from tests.builders import toy_template
from tests.harness_command import Ended, harness
from tests.session_servers.scripted import scripted_server
from tests.shard_fleet import ShardFleet

ACCOUNT = f"ctl-{getpass.getuser()}@{socket.gethostname()}"
OTHER = f"{ACCOUNT}-2-0123456789abcdef"


class Operator:
    """A person with a shell at the server `url`."""

    def __init__(self, url: str, token: str = "") -> None:
        self.url = url
        self._env = {"HARNESS_SERVER": url, "HARNESS_ADMIN_TOKEN": token}

    async def __call__(self, *arguments: str) -> Ended:
        return await asyncio.to_thread(harness, *arguments, env=self._env)


@pytest.fixture(name="server")
async def _server() -> AsyncIterator[RunningServer]:
    async with scripted_server() as server:
        yield server


@pytest.fixture(name="operator")
def _operator(server: RunningServer) -> Operator:
    return Operator(server.url)


async def test_resume_opens_nothing_that_another_controller_keeps_shut(operator: Operator):
    """A pause beside that of a machine with a longer name: each ends its own; by name a person ends the other's."""
    async with SessionServerClient(operator.url) as client:
        program = client.gate(OTHER, ttl_s=600)
        await program.pause(deadline_s=10)
        paused = await operator("ctl", "pause", "--ttl", "300", "--json")
        resumed = await operator("ctl", "resume", "--json")
        again = await operator("ctl", "resume", "--json")
        shut = await program.report(deadline_s=10)
        by_name = await operator("ctl", "resume", "--holder", OTHER)
        opened = await program.report(deadline_s=10)

    assert paused.code == 0, paused.stderr
    mine = paused.document["holder"]
    assert mine.startswith(ACCOUNT)
    holds = {each["holder"]: each for each in paused.document["gate"]["holds"]}
    assert holds.keys() == {OTHER, mine}
    assert 200 < holds[mine]["ends_in_s"] <= 300
    assert (resumed.code, resumed.document["holder"], resumed.document["gate"]["state"]) == (0, mine, "paused")
    assert again.code == 4
    assert OTHER in again.document["error"]["message"]
    assert [each.holder for each in shut.holds] == [OTHER]
    assert by_name.code == 0, by_name.stderr
    assert opened.state == "open"


async def test_of_two_holds_of_one_account_none_is_guessed(operator: Operator):
    """Two people share it: neither opens under the other. A name renews; one that is gone is said to be."""
    first = (await operator("ctl", "pause", "--json")).document["holder"]
    second = (await operator("ctl", "drain", "--json")).document["holder"]
    guessed = await operator("ctl", "resume")
    renewed = await operator("ctl", "pause", "--holder", first, "--ttl", "4000", "--json")
    released = [await operator("ctl", "resume", "--holder", name) for name in (second, first, first)]
    nobody = await operator("ctl", "resume")

    assert first != second
    assert guessed.code == 4
    assert first in guessed.stderr
    assert second in guessed.stderr
    assert {each["holder"]: each["kind"] for each in renewed.document["gate"]["holds"]} == {
        first: "pause",
        second: "drain",
    }
    assert [each.code for each in released] == [0, 0, 4]
    assert "released or expired" in released[-1].stderr
    assert (nobody.code, nobody.stdout.splitlines()[1]) == (0, "gate      open, 0 requests wait")


async def test_sessions_are_listed_and_deleted_by_what_their_ids_begin_with(operator: Operator):
    """One name that fits no session, or too short, deletes none of them."""
    ids = ["a" * 32, "a" * 12 + "b" * 20, "c" * 32]
    async with SessionServerClient(operator.url) as client:
        for each in ids:
            await client.create({"session_id": each})
        drained = await operator("ctl", "drain", "--json")
        listed = await operator("sessions", "list", "--json")
        shown = await operator("sessions", "show", "aaaaaaaaaaaab")
        refused = [await operator("sessions", "delete", ids[2], name) for name in ("a" * 12, "ccc", "deadbeef")]
        left = await client.sessions()
        deleted = await operator("sessions", "delete", "a" * 12 + "b", ids[0], ids[0], "--json")
        rest = await client.sessions()

    assert drained.document["gate"]["sessions_closed"] == 3
    assert {each["session_id"]: each["phase"] for each in listed.document["sessions"]} == dict.fromkeys(ids, "closing")
    assert shown.code == 0, shown.stderr
    assert ids[1] in shown.stdout
    assert [each.code for each in refused] == [4, 4, 4]
    assert len(left) == 3
    assert deleted.document == {"deleted": [ids[1], ids[0]], "unknown": [], "refused": {}}
    assert [each.session_id for each in rest] == [ids[2]]


class StubbornStore(MemoryStore):
    """Closes no session whose id begins with a "b"."""

    async def set_phase(self, session: Session | SessionStub) -> None:
        if session.session_id.startswith("b"):
            raise StoreError("the disk is broken")
        await super().set_phase(session)


async def test_a_deletion_says_what_became_of_each_session():
    """One that is not there, and one that stays, hide neither each other nor those that are gone."""
    here, stays, gone = "a" * 32, "b" * 32, "c" * 32
    chat_tokenizer = toy_template()
    async with (
        serve(ScriptedEngine(chat_tokenizer.tokenizer, None), chat_tokenizer, StubbornStore()) as server,
        SessionServerClient(server.url) as client,
    ):
        operator = Operator(server.url)
        for each in (here, stays):
            await client.create({"session_id": each})
        unknown = await operator("sessions", "delete", gone)
        mixed = await operator("sessions", "delete", stays, gone, here, "--json")
        left = [each.session_id for each in await client.sessions()]

    assert (unknown.code, unknown.stdout) == (4, f"unknown   {gone}\n")
    assert mixed.code == 6
    refused = mixed.document["refused"]
    assert mixed.document == {"deleted": [here], "unknown": [gone], "refused": {stays: refused[stays]}}
    assert "the disk is broken" in refused[stays]
    assert left == [stays]


async def test_a_server_that_nobody_reaches_leaves_a_hold_in_doubt():
    """And says so: a hold whose answer was lost stands until its time is over."""
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        ended = await Operator(f"http://127.0.0.1:{deaf.getsockname()[1]}")("ctl", "pause", "--ttl", "60")

    assert ended.code == 6
    assert f"the hold {ACCOUNT}" in ended.stderr


async def test_a_front_of_shards_is_turned_as_one_server(tmp_path: Path):
    """Status, hold and sessions of all shards; a wrong token is refused and places nothing."""
    async with ShardFleet(tmp_path) as fleet, fleet.client() as http:
        operator = Operator(fleet.url, fleet.address.admin_token or "")
        ids = {(await http.post("/sessions", json={})).json()["session_id"] for _ in range(4)}
        stranger = await Operator(fleet.url, "a-guess")("ctl", "pause")
        status = await operator("ctl", "status", "--json")
        paused = await operator("ctl", "pause")
        listed = await operator("sessions", "list", "--json")
        watched = await operator("ctl", "top", "--limit", "3", "--json")
        resumed = await operator("ctl", "resume", "--json")

    assert stranger.code == 6
    assert (len(watched.document["sessions"]), watched.document["totals"]["states"]) == (3, {"tool": 4})
    assert [each["shard"] for each in watched.document["workers"]] == [0, 1]
    assert len(watched.document["gate"]["holds"]) == 1
    assert "may stand" not in stranger.stderr
    assert (status.code, status.document["gate"]["holds"], status.document["workers"]) == (0, [], None)
    assert status.document["gate"]["sessions_open"] == 4
    assert "gate      paused" in paused.stdout
    assert {each["session_id"] for each in listed.document["sessions"]} == ids
    assert (resumed.code, resumed.document["gate"]["state"]) == (0, "open")

"""The live page of a session server, asked by hand: who is answered, and what is left behind."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from harness.cli.look.show import view
from harness.errors import RunError, SessionServerError
from harness.rollouts.client.connections import SessionServerAddress
from harness.server.settings import ServerSettings
from harness.types import Json
from harness.viewer.live.live_page import serve_live
from tests.builders import user
from tests.session_servers.scripted import canned_server, http_answer
from tests.session_servers.served import eventually, says, serving, session_on

TOKEN = "the-operators-own"
SETTINGS = ServerSettings(admin_token=TOKEN)
NOTHING = {"version": 0, "texts": 0, "open": "", "record": 0}


@asynccontextmanager
async def watching(url: str, token: str | None = TOKEN) -> AsyncIterator[httpx.AsyncClient]:
    """A browser, so to speak, at the live page of that server."""
    async with (
        serve_live(SessionServerAddress(url, token)) as page,
        httpx.AsyncClient(base_url=page.url, timeout=30, trust_env=False) as browser,
    ):
        yield browser


async def changes(browser: httpx.AsyncClient, **asked: object) -> Json:
    """What has changed."""
    answer = await browser.get("changes", params={**NOTHING, **asked})
    assert answer.status_code == 200, answer.text
    told: Json = answer.json()
    return told


async def test_only_its_own_address_is_answered():
    """Whoever has not the secret, or comes under another name, learns that somebody listens and nothing else."""
    async with serving(settings=SETTINGS) as client, watching(client.url) as browser:
        page = await browser.get("")
        port, secret = urlsplit(str(browser.base_url)).port, browser.base_url.path.strip("/")
        wrong = [
            await browser.get(f"http://127.0.0.1:{port}{path}")
            for path in ("", "/", "/changes", f"/{secret[:-1]}/", f"/{secret}", f"/{secret}/x", f"/x/{secret}/", "/%00")
        ]
        wrong += [await browser.request(method, "") for method in ("POST", "PUT", "OPTIONS", "HEAD")]
        wrong += [await browser.get("changes"), await browser.get("changes", params={**NOTHING, "version": "-1"})]
        other_hosts = [
            await browser.get("", headers={"host": host})
            for host in (f"evil.example:{port}", "127.0.0.1", "127.0.0.1:1", f"localhost.evil.example:{port}", "")
        ]
        by_name = await browser.get("", headers={"host": f"localhost:{port}"})

    assert (page.status_code, by_name.status_code) == (200, 200)
    assert [each.status_code for each in wrong] == [404] * 14
    assert [each.status_code for each in other_hosts] == [403] * 5
    assert {each.content for each in [*wrong, *other_hosts]} == {b""}
    assert len(secret) >= 32


async def test_the_page_asks_its_own_address_alone_and_has_no_token():
    """The policy admits that, and what the page of a run may; nobody may frame it or keep it."""
    async with serving(*says("One."), settings=SETTINGS) as client, watching(client.url) as browser:
        session = await client.create()
        await client.say(session, [user("Begin.")])
        page, told = await browser.get(""), await browser.get("changes", params={**NOTHING, "open": session.session_id})

    assert page.text.count("connect-src 'self';") == 1
    assert page.headers["content-security-policy"] == "frame-ancestors 'none'"
    assert (page.headers["cache-control"], page.headers["referrer-policy"]) == ("no-store", "no-referrer")
    assert told.headers["x-content-type-options"] == "nosniff"
    assert TOKEN not in page.text + told.text + str(page.headers) + str(told.headers)
    assert session.api_key not in page.text + told.text


async def test_a_server_that_does_not_tell_its_holds_is_shown_as_far_as_it_tells():
    """One of another version answers as to a session that it does not have."""
    gate = {"state": "open", "epoch": 0, "held": 0, "sessions": 1, "turns_in_flight": 0}
    line = {"session_id": "a" * 32, "phase": "open", "turns": 3, "turns_in_flight": 0}
    record = {"session_id": "holds", "phase": "unknown", "turns": []}
    about = {"harness": "0", "start": "0", "serves": {}, "engines": []}
    said = (gate, about, gate, {"sessions": [line]}, record)
    answers = [http_answer(200, json.dumps(each).encode()) for each in said]
    async with canned_server(*answers) as server, watching(server.url) as browser:
        told = await changes(browser)

    assert [(each["id"], each["outcome"], each["turns"]) for each in told["sessions"]] == [("a" * 32, "open", 3)]
    assert told["bands"] == []
    assert "expected" in told["problem"]


async def test_browsers_that_leave_or_never_read_leave_nothing_behind():
    """No task, no descriptor; and others are answered meanwhile."""
    async with serving(*says("Long. " * 3_000), settings=SETTINGS) as client, watching(client.url) as browser:
        session = await client.create()
        await client.say(session, [user("Begin.")])
        await changes(browser, open=session.session_id)
        tasks, descriptors = len(asyncio.all_tasks()), psutil.Process().num_fds()
        address = urlsplit(str(browser.base_url))
        query = f"version=0&texts=0&record=0&open={session.session_id}"
        request = f"GET {address.path}changes?{query} HTTP/1.1\r\nhost: {address.netloc}\r\n\r\n".encode()
        deaf = [await asyncio.open_connection(address.hostname, address.port, limit=1) for _ in range(30)]
        for _, writer in deaf:
            writer.write(request * 20)
        told = await changes(browser)
        for _, writer in deaf:
            writer.transport.abort()
        await eventually(lambda: len(asyncio.all_tasks()) <= tasks and psutil.Process().num_fds() <= descriptors)

    assert [line["id"] for line in told["sessions"]] == [session.session_id]


async def test_a_server_that_cannot_be_looked_at_is_said_at_once():
    """Before there is a page: one that is not there, and one that takes the token for none."""
    async with serving(settings=SETTINGS) as client:
        with pytest.raises(SessionServerError, match="401"):
            async with watching(client.url, "wrong"):
                pytest.fail("it was shown")
    with pytest.raises(SessionServerError, match="cannot be reached"):
        async with watching(client.url):
            pytest.fail("it was shown")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
async def test_the_command_shows_it_until_it_is_told_to_end(signum: signal.Signals):
    """The address in one document, the exit code 0, and the token in no argument."""
    async with session_on(settings=SETTINGS) as (client, session):
        command = (sys.executable, "-m", "harness", "view", "--server", client.url, "--json")
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, env={**os.environ, "HARNESS_ADMIN_TOKEN": TOKEN}
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(60):
                said = json.loads(await process.stdout.readuntil(b"}\n"))
                async with httpx.AsyncClient(base_url=said["url"], trust_env=False, timeout=30) as browser:
                    told = await changes(browser)
                process.send_signal(signum)
                rest, code = await process.stdout.read(), await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    assert said["server"] == client.url
    assert [line["id"] for line in told["sessions"]] == [session.session_id]
    assert (rest, code) == (b"", 0)


def test_a_run_is_no_server(tmp_path: Path):
    """It has a page that is written; and that has no port."""
    with pytest.raises(RunError, match="expected --out FILE"):
        view(tmp_path)
    with pytest.raises(RunError, match="expected --port or --out"):
        view(tmp_path, out=tmp_path / "run.html", port=1)

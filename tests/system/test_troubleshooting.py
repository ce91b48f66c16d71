"""docs/troubleshooting.md shows what goes wrong first, word for word: everything on that page is provoked here."""

import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness import ServerSettings
from harness.dialects.request_limits import RequestLimits
from tests.builders import user
from tests.checkout import ROOT
from tests.harness_command import harness, write_scenario
from tests.session_servers.served import Client, Served, bearer, says, serving, url_of

PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
ADMIN_TOKEN = "the-token-of-the-operator"

SHOWN = dict(re.findall(r"^### ([^\n]+)\n\n```text\n(.+?)\n```$", PAGE, flags=re.MULTILINE | re.DOTALL))
"""What the page shows under each of its headings."""


def assert_shown(heading: str, said: str) -> None:
    """The lines under `heading` are in what was said; what differs from case to case is an ellipsis on the page."""
    lines = ".*?".join(map(re.escape, SHOWN[heading].split("…")))
    assert re.search(f"^{lines}$", said, flags=re.DOTALL | re.MULTILINE), said


def test_every_heading_is_provoked() -> None:
    """A page that shows more than is checked here would be wrong one day."""
    assert sorted(SHOWN) == sorted([*COMMANDS, *CALLS])
    assert len(SHOWN) == PAGE.count("\n### ")
    assert len(SHOWN) >= 20


def _occupied(directory: Path) -> None:
    (directory / "out").mkdir()
    (directory / "out" / "samples.jsonl").touch()


def _failing_check(directory: Path) -> None:
    write_scenario(directory / "mine", check="def score(session, result, metadata):\n    return {'reward': 1 / 0}\n")


def _text(directory: Path) -> None:
    (directory / "sessions.db").write_text("no database")


def _scenario(directory: Path) -> None:
    write_scenario(directory / "mine")


def _nothing(directory: Path) -> None:
    del directory


COMMANDS: dict[str, tuple[Callable[[Path], None], list[str], int]] = {
    "A scenario is not found": (_nothing, ["run", "quickstrat"], 4),
    "A run's directory is there already": (_occupied, ["run", "starter", "--out", "out"], 4),
    "A server has no tokenizer": (_nothing, ["serve", "--engine", "sglang=http://127.0.0.1:1"], 4),
    "An engine is not there": (_scenario, ["serve", "--engine", "vllm=http://127.0.0.1:1", "--tokenizer", "toy"], 6),
    "A file is no store": (_text, ["show", "sessions.db"], 6),
    "A server is not there": (_nothing, ["ctl", "status", "--server", "http://127.0.0.1:1"], 6),
    "A check of a run fails": (_failing_check, ["run", "mine", "--out", "out"], 1),
}
"""By heading: what is there before, what is called, and how it exits."""


@pytest.mark.parametrize("heading", COMMANDS)
def test_a_command_says_what_the_page_shows(heading: str, tmp_path: Path) -> None:
    """On standard error, with the exit code that the page names."""
    arrange, arguments, code = COMMANDS[heading]
    arrange(tmp_path)
    done = harness(*arguments, cwd=tmp_path)

    assert done.code == code
    assert_shown(heading, done.stderr + done.stdout)


def _told(answer: httpx.Response) -> str:
    return f"{answer.status_code} {answer.json()['error']['message']}"


async def _chat(client: Client[Any], session: Served, **fields: Any) -> str:
    return _told(await client.chat(session, fields.pop("messages", [user("hi")]), **fields))


async def _without_a_key(client: Client[Any]) -> str:
    session = await client.create()
    return _told(await client.http.post(url_of(session), json={"messages": []}, headers={"authorization": ""}))


async def _with_a_guess(client: Client[Any]) -> str:
    return _told(await client.http.post("/sessions", json={}, headers=bearer("a guess")))


async def _with_a_path_too_much(client: Client[Any]) -> str:
    session = await client.create()
    url = f"{url_of(session)}/chat/completions"
    return _told(await client.http.post(url, json={"messages": []}, headers=bearer(session.api_key)))


async def _of_a_deleted_session(client: Client[Any]) -> str:
    session = await client.create()
    await client.http.delete(f"/sessions/{session.session_id}")
    return await _chat(client, session)


async def _a_second_turn_of_one(client: Client[Any]) -> str:
    session = await client.create(limits={"turns": 1})
    await client.say(session, [user("hi")])
    return await _chat(client, session)


async def _referring(client: Client[Any]) -> str:
    session = await client.create()
    url, items = f"/sessions/{session.session_id}/v1/responses", [user("hi"), {"type": "item_reference", "id": "msg_1"}]
    return _told(await client.http.post(url, json={"input": items}, headers=bearer(session.api_key)))


def _behind(verb: str) -> Callable[[Client[Any]], Awaitable[str]]:
    async def ask(client: Client[Any]) -> str:
        session = await client.create()
        await client.http.post(f"/sessions/{verb}", json={"holder": "somebody"})
        return await _chat(client, session)

    return ask


def _asking(**fields: Any) -> Callable[[Client[Any]], Awaitable[str]]:
    async def ask(client: Client[Any]) -> str:
        return await _chat(client, await client.create(), **fields)

    return ask


def _creating(**fields: Any) -> Callable[[Client[Any]], Awaitable[str]]:
    async def ask(client: Client[Any]) -> str:
        return _told(await client.http.post("/sessions", json=fields))

    return ask


IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}

CALLS: dict[str, Callable[[Client[Any]], Awaitable[str]]] = {
    "An agent shows no key": _without_a_key,
    "An owner shows no admin token": _with_a_guess,
    "A route is not found": _with_a_path_too_much,
    "A session is over": _of_a_deleted_session,
    "A session's turns are used up": _a_second_turn_of_one,
    "Several choices are asked for": _asking(n=2),
    "An image is sent": _asking(messages=[IMAGE]),
    "An item is referred to that the session does not have": _referring,
    "The prompt is longer than the context": _asking(messages=[user("word " * 600)]),
    "A body is too large": _asking(messages=[user("x" * 40_000)]),
    "Everything is drained": _behind("drain"),
    "A pause lasts too long": _behind("pause"),
    "A script is not allowed": _creating(script={"steps": [{"text": "hi"}]}),
}
"""By heading: what a client does, and what it is told."""


@pytest.mark.parametrize("heading", CALLS)
async def test_a_server_says_what_the_page_shows(heading: str) -> None:
    settings = ServerSettings(
        admin_token=ADMIN_TOKEN, pause_timeout_s=0.2, drain_grace_s=0.2, limits=RequestLimits(body_bytes=30_000)
    )
    async with serving(*says("Hello."), settings=settings, context_length=512) as client:
        said = await CALLS[heading](client)

    assert_shown(heading, said)

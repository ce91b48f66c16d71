"""Ten tasks of a reader at the page, each in at most three actions, by what a person sees: roles and labels alone."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from playwright.async_api import Browser, Locator

from harness.cli.look.show import view
from harness.engines.scripted import Script, ScriptedEngine
from harness.types import Json
from tests.browser import Sight, looking_at
from tests.builders import tool, user
from tests.session_servers.served import Client, says, session_on, url_of
from tests.toy_model import write_toy_model
from tests.viewed_run import CRASH, WHY_ZERO, write_viewed_diff, write_viewed_run

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("browser")]

MOST_ACTIONS = 3
SAMPLING: Json = {"temperature": 0.5, "top_k": 7, "stop": ["never"], "seed": 3}
ANSWERS = ["Is it 'ten'?", 'In "TOML": \\ \x7f\n \u00e9.']


class Reader:
    """A person with a mouse, whose actions are counted."""

    def __init__(self, sight: Sight) -> None:
        self.page = sight.page
        self.sight = sight
        self.actions = 0

    async def click(self, role: str, name: str) -> None:
        """Click the first element of that role and name."""
        self.actions += 1
        await self.page.get_by_role(role, name=name).first.click()  # type: ignore[arg-type]

    async def open(self, name: str) -> None:
        """Click the first session that says `name`."""
        self.actions += 1
        await self.see("listbox", "sessions").get_by_role("option", name=name).first.click()

    async def select(self, label: str, option: str) -> None:
        """Choose an option of a field."""
        self.actions += 1
        await self.page.get_by_label(label, exact=True).select_option(label=option)

    async def copy(self, name: str) -> str:
        """Copy something of the first session's last turn from its raw view."""
        await self.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        await self.open("turn")
        await self.click("tab", "Raw")
        await self.click("button", name)
        await self.see("button", "copied").wait_for()
        copied: str = await self.page.evaluate("navigator.clipboard.readText()")
        return copied

    def see(self, role: str, name: str) -> Locator:
        """Look at an element."""
        return self.page.get_by_role(role, name=name, exact=True)  # type: ignore[arg-type]


@asynccontextmanager
async def reading(
    browser: Browser, folder: Path, write: Callable[[Path], None] = write_viewed_run, at: str = ""
) -> AsyncIterator[Reader]:
    """A reader at the page, at the link `at` of it."""
    write(folder / "run.html")
    async with looking_at(browser, folder / "run.html") as sight:
        if at:
            await sight.page.goto("about:blank")
            await sight.page.goto((folder / "run.html").as_uri() + at)
            assert sight.asked.pop().startswith(sight.asked[0])
        reader = Reader(sight)
        yield reader
        assert reader.actions <= MOST_ACTIONS


@asynccontextmanager
async def reading_store(browser: Browser, folder: Path) -> AsyncIterator[tuple[Reader, Client[ScriptedEngine]]]:
    """A reader at the page of a store that a server holds open, with a session that sends tools and parameters."""
    write_toy_model(folder / "toy")
    asked = {**SAMPLING, "max_tokens": 50, "tools": [tool("guess")]}
    async with session_on(*says(*ANSWERS), store=folder / "run.db") as (client, session):
        first = await client.say(session, [user("It's from 1 to 20.")], **asked)
        await client.say(session, [user("It's from 1 to 20."), first, user("Too low.")], **asked)
        write = partial(view, folder / "run.db", tokenizer=folder / "toy")
        async with reading(browser, folder, lambda page: write(out=page)) as reader:
            yield reader, client


async def test_find_the_session_with_reward_0_and_why(browser: Browser, tmp_path: Path):
    async with reading(browser, tmp_path) as reader:
        await reader.select("reward", "reward 0 or less")
        await reader.open("finished")
        await reader.click("tab", "Score")
        assert WHY_ZERO in await reader.see("tabpanel", "score").inner_text()


async def test_find_the_first_token_where_two_runs_differ(browser: Browser, tmp_path: Path):
    async with reading(browser, tmp_path, write_viewed_diff) as reader:
        await reader.click("button", "Compare A 0 with B 0")
        seen = reader.see("tabpanel", "compare")
        assert "First difference: turn 1, output, token 7" in await seen.inner_text()
        assert await seen.get_by_role("mark").all_text_contents() == ["5", "6"]


async def test_find_all_dropped_tokens_and_why(browser: Browser, tmp_path: Path):
    async with reading(browser, tmp_path) as reader:
        await reader.click("button", "Dropped tokens: other_sample")
        seen = await reader.see("tabpanel", "tokens").inner_text()
        assert "dropped: other_sample" in seen
        assert "17 tokens, in turn 1" in seen


async def test_find_the_turns_during_an_update(browser: Browser, tmp_path: Path):
    async with reading(browser, tmp_path) as reader:
        await reader.click("button", "update")
        turns = reader.see("region", "timeline").get_by_role("button", name="turn")
        assert await turns.all_text_contents() == [
            "session 0 turn 1 completed",
            "session 1 turn 1 completed",
            "session 2 turn 1 completed",
        ]


async def test_find_the_stray_call(browser: Browser, tmp_path: Path):
    async with reading(browser, tmp_path) as reader:
        await reader.click("button", "Calls of role stray")
        await reader.click("tab", "Conversation")
        assert (
            "stray: the program pytest, which began below agent" in await reader.see("article", "turn 2").inner_text()
        )


async def test_find_the_worst_prompt(browser: Browser, tmp_path: Path):
    async with reading(browser, tmp_path) as reader:
        await reader.select("order", "worst first")
        assert (await reader.see("listbox", "sessions").inner_text()).startswith("games prompt 2")


async def test_find_the_slowest_turn(browser: Browser, tmp_path: Path):
    async with reading(browser, tmp_path) as reader:
        await reader.click("button", "Slowest turn")
        assert "3.25 s" in await reader.see("article", "turn 0").inner_text()


async def test_copy_a_request_as_curl_and_run_it(browser: Browser, tmp_path: Path):
    """Against another session, whose address and key a shell has in the client's variables: it is the same request."""
    async with reading_store(browser, tmp_path) as (reader, client):
        curl = await reader.copy("copy as curl")
        session = await client.create()
        address = {
            "OPENAI_BASE_URL": client.url + url_of(session).removesuffix("/chat/completions"),
            "OPENAI_API_KEY": session.api_key,
            "NO_PROXY": "*",
        }
        run = partial(subprocess.run, ["sh", "-c", curl], env=address, capture_output=True, text=True, timeout=30)
        answer = await asyncio.to_thread(run)

        assert ANSWERS[0] in answer.stdout, answer
        [asked_again] = (await client.record(session))["turns"]
        assert asked_again["sampling"]["asked"] == {**SAMPLING, "max_new_tokens": 50}
        assert asked_again["notes"]["tool_definitions"] == [tool("guess")]
        assert asked_again["messages_delta"] == [user("It's from 1 to 20.")]


async def test_copy_a_session_as_test_input(browser: Browser, tmp_path: Path):
    """The script of a scripted engine, which gives the same answers."""
    async with reading_store(browser, tmp_path) as (reader, _):
        (tmp_path / "script.toml").write_text(await reader.copy("copy as test input"), "utf-8")
    async with session_on(*Script.load(tmp_path / "script.toml").steps) as (client, session):
        assert [(await client.say(session, [user(each)]))["content"] for each in "12"] == ANSWERS


async def test_open_a_permalink(browser: Browser, tmp_path: Path):
    """The address that is copied at a token leads to it."""
    async with reading(browser, tmp_path, at="#22222222/1/3") as reader:
        assert "token 3 of turn 1" in await reader.see("group", "token").inner_text()
        assert await reader.see("tab", "Tokens").get_attribute("aria-selected") == "true"
        assert reader.page.url.endswith(f"#{'2' * 32}/1/3")


async def test_read_the_log_of_an_agent(browser: Browser, tmp_path: Path):
    async with reading(browser, tmp_path) as reader:
        await reader.open("crashed")
        await reader.click("tab", "Log")
        assert f"Traceback (most recent call last):\n{CRASH}" in await reader.see("tabpanel", "log").inner_text()

"""The live page of a session server in Chromium: it follows what happens, and leaves its reader where he is."""

import asyncio
import re
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path

import pytest
from playwright.async_api import Browser

from harness.engines.base import PauseMode
from harness.engines.scripted import ScriptedEngine, ScriptStep
from harness.rollouts.client.connections import SessionServerAddress
from harness.server.settings import ServerSettings
from harness.viewer.live.live_page import RunningPage, serve_live
from tests.browser import HOSTILE, PATIENCE_S, Sight, looking_at
from tests.builders import user
from tests.free_ports import free_ports
from tests.session_servers.served import Client, eventually, says, serving

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("browser")]

TOKEN = "the-operators-own"
SLOW = ScriptStep(text="One word after the other, and on it goes for quite a while.", token_delay_s=0.02)
SETTINGS = ServerSettings(admin_token=TOKEN)


def live(client: Client) -> AbstractAsyncContextManager[RunningPage]:
    """The live page of the server."""
    return serve_live(SessionServerAddress(client.url, TOKEN))


async def sample_one_more(engine: ScriptedEngine) -> None:
    """Let the one request continue by a token or two, and then stand still: a browser may take long to show it."""
    sampled = sum(live.sampled for live in engine.live)
    await engine.resume()
    await eventually(lambda: sum(live.sampled for live in engine.live) > sampled)
    await engine.pause(PauseMode.KEEP)


async def chosen(sight: Sight) -> str:
    """The row of the session that is chosen."""
    return (await sight.texts("#sessions .chosen"))[0]


async def until_texts(sight: Sight, selector: str, count: int) -> None:
    """Return once so many elements are there."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while len(await sight.texts(selector)) != count:  # the page says it, and nobody else
                await asyncio.sleep(0.03)
    except TimeoutError:
        pytest.fail(f"expected {count} of {selector}, found {await sight.texts(selector)}; {sight.wrongs}")


async def until_true(sight: Sight, expression: str) -> None:
    """Return once it is so in the script of the page, whose policy forbids playwright's own way to wait for that."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not await sight.page.evaluate(expression):
                await asyncio.sleep(0.03)
    except TimeoutError:
        pytest.fail(f"{expression} never was so; {sight.wrongs}")


async def test_a_turn_is_seen_while_it_grows_and_when_it_has_ended(browser: Browser):
    """Of a session that began after the page was opened; without a reload, and without its token reaching the page."""
    async with serving(SLOW, settings=SETTINGS) as client, live(client) as page, looking_at(browser, page.url) as sight:
        await sight.until("facts", "sessions: none")
        session = await client.create()
        await sight.until("sessions", session.session_id[:8])
        await sight.press("Enter")
        await sight.until("ending", f"{session.session_id}")
        await client.engine.pause(PauseMode.KEEP)
        call = asyncio.create_task(client.say(session, [user("Begin.")]))
        await sight.until("why", "1 in flight")
        grown: list[int] = []
        for distinct in (1, 2, 3):
            await sample_one_more(client.engine)
            while len({*grown}) < distinct:
                grown += [int(count) for count in re.findall(r"(\d+) tokens(?!/)", await chosen(sight))]
                await asyncio.sleep(0.05)
        flying = await sight.texts(".turn.flying")
        await client.engine.resume()
        said = (await call)["content"]
        await until_texts(sight, "#turns .row", 1)

        assert grown == sorted(grown)
        assert len(flying) == 1
        assert said in await sight.text("conversation")
        await sight.press("2")
        assert said in "".join(await sight.texts(".token.trained"))
        assert await sight.texts(".turn.flying") == []
        assert "tool1 turn" in await chosen(sight)
        assert re.search(r"state\s*tool", await sight.text("ending"))
        assert "outcome" not in await sight.text("ending")
        assert TOKEN not in await sight.page.content()


async def test_the_reader_stays_where_he_is(browser: Browser):
    """Turn, token, scrolled place, fields and focus, while turns and sessions come."""
    long = "\n".join(f"Line {number} of a long answer." for number in range(80))
    async with serving(*says(long), settings=SETTINGS) as client, live(client) as page:
        first, other = [await client.create() for _ in range(2)]
        messages = [user("Begin.")]
        for _ in range(3):
            messages += [await client.say(first, messages), user("More.")]
        async with looking_at(browser, page.url) as sight:
            await sight.until("sessions", other.session_id[:8])
            await sight.press("Enter")
            await until_texts(sight, "#turns .row", 3)
            await sight.press("j", "f", "n", "n", "ArrowRight")
            await sight.page.evaluate("document.querySelector('#strip').scrollTop += 333")
            await sight.press("/")
            await sight.page.keyboard.type(" ")
            before, found = await place(sight), await sight.text("found")
            await client.say(first, messages)
            await client.say(first, [user("Something else.")])
            third = await client.create()
            await sight.until("sessions", third.session_id[:8])
            await until_texts(sight, "#turns .row", 5)
            await sight.until("found", "in turn 0, 1, 2, 3")  # rows come before what is found in them
            after, now, value = await place(sight), await sight.text("found"), await sight.text("token")
            await sight.page.keyboard.type("7")
            typed = await sight.page.input_value("#filter")
            await sight.press("Control+a", "Delete", "Escape", "1")
            await sight.page.evaluate("document.querySelector('#conversation').scrollTop = 77")
            await client.say(first, [user("A third thing.")])
            await until_texts(sight, "#turns .row", 6)
            scrolled = await sight.page.evaluate("document.querySelector('#conversation').scrollTop")

    assert before["strip"] > 300
    assert scrolled == 77
    assert before["focus"] == "filter"
    assert after == before
    assert (found, now) == ("6,210 tokens, in turn 0, 1, 2", "8,280 tokens, in turn 0, 1, 2, 3")
    assert value.startswith("token 1 of turn 1")
    assert "trained" in value
    assert typed == " 7"


async def place(sight: Sight) -> dict[str, object]:
    """Where the reader is, once what came into sight is drawn: a slice of it in each frame."""
    await sight.page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    await until_true(sight, "!strip.waits")
    found: dict[str, object] = await sight.page.evaluate(
        """() => ({
          strip: document.querySelector("#strip").scrollTop,
          focus: document.activeElement.id,
          fate: asked.fate,
          typed: document.querySelector("#filter").value,
          name: document.querySelector("#name").textContent,
          token: document.querySelector("#token h2").textContent,
          row: rows[Math.floor(document.querySelector("#strip").scrollTop / ROW_HEIGHT)].from,
          drawn: [...document.querySelectorAll("#strip .tokens")].map((each) => each.textContent).sort(),
          turn: document.querySelector("#turns .chosen span").textContent.replace(/[ +]/g, ""),
          session: document.querySelector("#sessions .chosen b").textContent,
        })"""
    )
    return found


async def test_a_pause_is_a_band_while_it_lasts_and_when_it_is_over(browser: Browser):
    """With its holder; a turn that waits for it says so."""
    async with serving(*says("One.", "Two."), settings=SETTINGS) as client, live(client) as page:
        session = await client.create()
        first = await client.say(session, [user("Begin.")])
        async with looking_at(browser, page.url) as sight:
            await sight.until("span", " s")
            await client.http.post("/sessions/pause", json={"holder": "trainer"})
            call = asyncio.create_task(client.say(session, [user("Begin."), first, user("More.")]))
            await sight.until("keys", "pause")
            await sight.until("sessions", "held")
            await sight.until("facts", "gate: paused, 1 requests wait")
            await client.http.post("/sessions/resume", json={"holder": "trainer"})
            await call
            await sight.until("facts", "gate: open")
            [(begin, end)] = await sight.page.evaluate("run.bands.map((each) => [each.begin, each.end])")
            await sight.choose("t", f"{(begin + end) / 2 - await sight.page.evaluate('begin'):.3f}")

            assert await sight.texts(".band.pause") == [""]
            assert (await sight.text("moment")).startswith("pause: by trainer, from second ")


async def test_a_server_that_goes_away_and_comes_back_is_said(browser: Browser, tmp_path: Path):
    """What was seen stays; what it has when it is back is shown, and what it has no more is marked."""
    settings = ServerSettings(admin_token=TOKEN, port=free_ports())
    async with AsyncExitStack() as stack:
        async with serving(*says("One."), store=tmp_path / "run.db", settings=settings) as client:
            page = await stack.enter_async_context(live(client))
            kept, deleted = [await client.create() for _ in range(2)]
            await client.say(deleted, [user("Begin.")])
            sight = await stack.enter_async_context(looking_at(browser, page.url))
            await sight.until("sessions", deleted.session_id[:8])
            await sight.press("j", "Enter")
            await sight.until("conversation", "One.")
            await client.http.delete(f"/sessions/{deleted.session_id}")
            await sight.until("why", "no longer on the server: as last seen")
        await sight.until("standing", "the server does not answer")
        assert "One." in await sight.text("conversation")
        async with serving(*says("One."), store=tmp_path / "run.db", settings=settings) as client:
            await client.create()
            await until_texts(sight, "#sessions .session", 3)

            await until_true(sight, "document.querySelector('#standing').innerText === ''")
            assert (await sight.texts("#sessions .session b"))[:2] == [kept.session_id[:8], deleted.session_id[:8]]


async def test_a_page_whose_harness_view_has_stopped_says_so(browser: Browser):
    async with serving(settings=SETTINGS) as client, AsyncExitStack() as stack:
        page = await stack.enter_async_context(live(client))
        session = await client.create()
        async with looking_at(browser, page.url) as sight:
            await sight.until("sessions", session.session_id[:8])
            await stack.aclose()
            await sight.until("standing", "harness view has stopped")
            await sight.press("Enter")

            assert session.session_id in await sight.text("ending")
            assert all("ERR_CONNECTION_REFUSED" in wrong for wrong in sight.wrongs), sight.wrongs
            sight.wrongs.clear()


async def test_a_hostile_transcript_is_text_while_it_comes(browser: Browser):
    """Of an agent and of a model; and so is the name of a holder."""
    async with serving(*says("One.", HOSTILE), settings=SETTINGS) as client, live(client) as page:
        session = await client.create()
        async with looking_at(browser, page.url) as sight:
            await sight.until("sessions", session.session_id[:8])
            await sight.press("Enter")
            first = await client.say(session, [user("Begin.")])
            await client.say(session, [user("Begin."), first, user(HOSTILE.replace("\x00", ""))])
            await client.http.post("/sessions/pause", json={"holder": "<img src=x onerror='owned = 1'>"})
            await until_texts(sight, "#turns .row", 2)
            await sight.press("j")
            await sight.until("conversation", "</script><script>owned = 1</script>")
            await sight.until("keys", "pause")
            await sight.choose("t", "0")

            await sight.press("Escape", "Enter", "2")
            assert "\\u{202e}right to left\\u{2066}" in "".join(await sight.texts(".token"))
            assert await sight.page.evaluate("window.owned === undefined")
            assert await sight.page.evaluate("document.querySelectorAll('img').length") == 0


async def test_several_browsers_see_the_same(browser: Browser):
    """Each with another session open, one of them late; and a filter by state."""
    async with (
        serving(*says("One word."), settings=SETTINGS) as client,
        live(client) as page,
        AsyncExitStack() as stack,
    ):
        sessions = [await client.create() for _ in range(3)]
        sights = [await stack.enter_async_context(looking_at(browser, page.url)) for _ in range(2)]
        for number, sight in enumerate(sights):
            await sight.until("sessions", sessions[2].session_id[:8])
            await sight.press(*["j"] * number, "Enter")
        await asyncio.gather(*(client.say(each, [user(f"Begin {number}.")]) for number, each in enumerate(sessions)))
        sights.append(await stack.enter_async_context(looking_at(browser, page.url)))
        await sights[2].until("sessions", sessions[2].session_id[:8])
        await sights[2].press("j", "j", "Enter")
        for number, sight in enumerate(sights):
            await sight.until("conversation", f"Begin {number}.")
            await until_texts(sight, "#turns .row", 1)
            await sight.press("2")
            assert "One word" in "".join(await sight.texts(".token.trained"))
        await sights[0].choose("o", "tool")
        await until_texts(sights[0], "#sessions .session", 3)
        await client.http.post(f"/sessions/{sessions[1].session_id}/drain")
        await until_texts(sights[0], "#sessions .session", 2)


async def test_the_chosen_session_stays_chosen_when_all_is_told_anew(browser: Browser):
    """As after a night in which the server has forgotten sessions that stood above it."""
    async with serving(*says("One."), settings=SETTINGS) as client, live(client) as page:
        sessions = [await client.create() for _ in range(3)]
        await client.say(sessions[1], [user("Begin.")])
        async with looking_at(browser, page.url) as sight:
            await sight.until("sessions", sessions[2].session_id[:8])
            await sight.page.evaluate("takeLines([{ ...run.sessions[0], id: 'forgotten', times: [] }], false)")
            await sight.page.evaluate("run.sessions.unshift(run.sessions.pop()); filter(); choose(2)")
            await sight.press("Enter")
            await until_texts(sight, "#turns .row", 1)
            await sight.page.evaluate("version = 0")
            await until_texts(sight, "#sessions .session", 3)

            assert sessions[1].session_id[:8] in await chosen(sight)
            assert sessions[1].session_id in await sight.text("ending")
            assert len(await sight.texts(".turn")) == 1


async def test_of_sessions_that_are_gone_and_bands_that_are_over_the_last_stay(browser: Browser):
    """The page lets go of the others by itself, and is not told everything again for that."""
    async with serving(*says("One."), settings=SETTINGS) as client, live(client) as page:
        sessions = [await client.create() for _ in range(4)]
        async with looking_at(browser, page.url) as sight:
            await sight.until("sessions", sessions[3].session_id[:8])
            await sight.page.evaluate("run.most_gone = run.most_bands = 1")
            await sight.press("j", "j", "j")
            for number in (1, 0):
                await client.http.delete(f"/sessions/{sessions[number].session_id}")
                await until_true(sight, f"known.get('{sessions[number].session_id}').is_gone")
                await until_texts(sight, "#sessions .session", 3 + number)
            for holder in ("first", "second", "third"):
                await client.http.post("/sessions/pause", json={"holder": holder})
                await client.http.post("/sessions/resume", json={"holder": holder})
            await until_true(sight, "run.bands.length === 1 && run.bands[0].words === 'by third'")

            assert await sight.page.evaluate("shown.map((each) => each.id)") == [
                session.session_id for session in (sessions[0], *sessions[2:])
            ]
            assert sessions[3].session_id[:8] in await chosen(sight)


async def test_an_id_that_is_used_again_has_the_turns_of_the_new_session(browser: Browser):
    async with serving(*says("One."), settings=SETTINGS) as client, live(client) as page:
        session = await client.create()
        await client.say(session, [user("Begin.")])
        async with looking_at(browser, page.url) as sight:
            await until_texts(sight, ".turn", 1)
            await sight.page.evaluate("run.sessions[0].created_at -= 1; run.sessions[0].times[0][3] = 7")
            await client.say(session, [user("Again.")])
            await until_true(sight, "run.sessions[0].times.map((time) => time[3]).join() === '1'")


async def test_what_was_taken_by_half_is_told_again(browser: Browser):
    fail_once = """
    window.real = showConversation;
    showConversation = () => { showConversation = real; throw new Error('for once'); };
    0"""
    async with serving(*says("One."), settings=SETTINGS) as client, live(client) as page:
        session = await client.create()
        async with looking_at(browser, page.url) as sight:
            await sight.until("sessions", session.session_id[:8])
            await sight.press("Enter")
            await sight.until("ending", session.session_id)
            await sight.page.evaluate(fail_once)
            await client.say(session, [user("Begin.")])
            await sight.until("conversation", "One.")

            assert await sight.texts("#turns .row")
            assert [wrong for wrong in sight.wrongs if "for once" not in wrong] == []
            assert sight.wrongs
            sight.wrongs.clear()

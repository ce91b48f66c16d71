"""The page of a run in Chromium: it answers what one asks of a run, by keys, and does nothing else."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from math import inf, nan
from pathlib import Path
from typing import Any, Literal

import pytest
import pytest_asyncio
from playwright.async_api import Browser

from harness.sessions.record import session_record
from harness.types import Json
from harness.viewer.page.run_page import Side, write_page
from harness.viewer.run_view import Band, RunView, SessionLine
from harness.viewer.session_view import SessionView, TurnView
from tests.browser import HOSTILE, WINDOW, Sight, browsing, looking_at
from tests.builders import new_session, take_turn, toy_tokenizer, user
from tests.page_pictures import DIGEST, PICTURES, WIDTHS, page_digest, take_pictures
from tests.viewed_run import BEGAN_AT, CRASH, LOG, long_turn, viewed_run, viewed_sessions, write_viewed_run

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("browser")]

SHARES = """
() => {
  const all = document.querySelector("#lanes .bands").getBoundingClientRect();
  return [...document.querySelectorAll(".bands > *")].map((each) => {
    const { left, width } = each.getBoundingClientRect();
    return [each.className, (left - all.left) / all.width, width / all.width];
  });
}
"""
TOO_WIDE = """
() => [...document.querySelectorAll("html, body, body *")].filter((each) => each.checkVisibility()
  && (each.getBoundingClientRect().right > innerWidth + 1 && !each.closest("#strip, #lanes")
    || each.scrollWidth > each.clientWidth + 1 && ["auto", "scroll"].includes(getComputedStyle(each).overflowX)))
  .map((each) => each.id || each.outerHTML.slice(0, 80))
"""
CONTRASTS = """
() => {
  const parse = (color) => {
    const c = color.match(/[\\d.]+/g).map(Number);
    const scaled = color.startsWith("color(") ? c.map((each, at) => at < 3 ? 255 * each : each) : c;
    return c.length < 4 ? [...scaled, 1] : scaled;
  };
  const luminance = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const over = (top, below) => top.slice(0, 3).map((c, i) => c * top[3] + below[i] * (1 - top[3]));
  const ground = (element) => {
    if (!element) return [255, 255, 255];
    return over(parse(getComputedStyle(element).backgroundColor), ground(element.parentElement));
  };
  const found = {};
  for (const element of document.querySelectorAll("body *")) {
    const says = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!says || !element.checkVisibility() || element.matches("script, option, .other")) continue;
    const [a, b] = [luminance(parse(getComputedStyle(element).color)), luminance(ground(element))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) found[element.tagName + "." + element.className] = contrast;
  }
  return found;
}
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="browser")
async def _browser() -> AsyncIterator[Browser]:
    async with browsing() as browser:
        yield browser


@pytest.fixture(name="run_page")
def _run_page(tmp_path: Path) -> Path:
    write_viewed_run(tmp_path / "run.html")
    return tmp_path / "run.html"


def write_one(path: Path, turn: TurnView) -> None:
    """The page of one session with one turn."""
    session = SessionView("a" * 32, "closed", [turn], 0, {}, {})
    write_page(path, Side(RunView("run", [SessionLine("a" * 32)]), lambda _: session, None))


async def test_why_did_session_3_end(browser: Browser, run_page: Path):
    """How, who is to blame, and the last words of its agent; in the list, and where it is open, with the log."""
    async with looking_at(browser, run_page) as sight:
        await sight.press("j", "j", "j")
        [row] = await sight.texts("#sessions .chosen")
        assert all(words in row for words in ("3", "crashed", "1 turn", "10 tokens", CRASH))
        await sight.press("Enter", "5")

        assert await sight.text("name") == "session 3 · crashed"
        assert await sight.text("why") == f"by the agent; {CRASH}"
        assert LOG.strip() in await sight.text("log")


async def test_which_tokens_of_version_2_were_trained(browser: Browser, run_page: Path):
    """They stand out, are counted, and `n` goes from one stretch of them to the next and tells of it."""
    async with looking_at(browser, run_page) as sight:
        await sight.press("j", "Enter", "2", "v", "v", "f")

        assert await sight.text("found") == "22 tokens, in turn 1, 2"
        assert "".join(await sight.texts(".token.trained:not(.other)")) == "After: blue.<|im_end|>And green"
        assert await sight.texts(".token.context:not(.other)") == []
        await sight.press("n")
        token = (await sight.text("token")).split("\n")
        assert token[0] == "token 0 of turn 1"
        assert {"version", "2", "goes to", "trained", '"A"'} <= set(token)
        await sight.press("n", "ArrowRight")
        assert (await sight.text("token")).startswith("token 1 of turn 2")
        assert await sight.texts(".token.chosen") == ["n"]


async def test_where_did_the_dropped_tokens_go(browser: Browser, run_page: Path):
    """The run says how many and why, its session in which turn, and the strip which they are."""
    async with looking_at(browser, run_page) as sight:
        assert "17 dropped (17 other_sample); difference 0" in await sight.text("facts")
        await sight.press("j", "j", "Enter", "3")
        assert "17 dropped (17 other_sample)" in await sight.text("ending")
        assert [text.endswith("17 other_sample") for text in await sight.texts("#turns .row")] == [False, True, False]
        await sight.press("f")

        assert await sight.text("found") == "17 tokens, in turn 1"
        assert "".join(await sight.texts(".token.dropped:not(.other)")) == "It must be left.<|im_end|>"


async def test_what_happened_at_second_7(browser: Browser, run_page: Path):
    """The update that it was in, the fault before it and the turns under way; all of it as bands behind the lanes."""
    async with looking_at(browser, run_page) as sight:
        await sight.choose("t", "7")

        assert (await sight.text("moment")).splitlines() == [
            "update: by trainer, from second 6.50 to 7.60",
            "the fault before: abort_engine, aborted 2 requests, at second 6.90",
            "under way: session 1 turn 1 completedsession 2 turn 1 completed",
        ]
        bands = [
            (name, round(left * 12, 1), round(width * 12, 1)) for name, left, width in await sight.page.evaluate(SHARES)
        ]
        assert (await sight.text("span")) == "12.00 s"
        assert await sight.texts(".tick") == ["0 s", "2 s", "4 s", "6 s", "8 s", "10 s", "12 s"]
        assert bands == [
            ("band pause", 3.0, 0.4),
            ("band update", 6.5, 1.1),
            ("band fault", 6.9, 0.0),
            ("band drain", 9.0, 3.0),
            ("moment", 7.0, 0.0),
        ]


async def test_bands_of_other_days_are_left_out_and_many_are_few_elements(browser: Browser, run_page: Path):
    """A store keeps a hundred thousand; the scale is that of the turns."""
    sessions = viewed_sessions()
    run = viewed_run(sessions)
    days = [Band("drain", BEGAN_AT - 86_400 * day, BEGAN_AT - 86_400 * day + 1, "by operator") for day in (1, 2)]
    many = [Band("pause", BEGAN_AT + n * 12e-5, BEGAN_AT + (n + 1) * 12e-5, "by trainer") for n in range(100_000)]
    banded = replace(run, bands=[*days, *many])
    write_page(run_page, Side(banded, lambda session_id: sessions[session_id], toy_tokenizer()))

    async with looking_at(browser, run_page) as sight:
        assert (await sight.text("span"), await sight.text("keys")) == ("12.00 s", "pause")
        assert 1_000 < len(await sight.texts(".band")) <= 2_000
        await sight.choose("t", "7")
        assert (await sight.text("moment")).startswith("pause: by trainer, from second 7.00 to 7.00")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_everything_can_be_read_in_light_and_dark(
    browser: Browser, run_page: Path, scheme: Literal["light", "dark"]
):
    """Each text of each view has a contrast of 4.5 to what is behind it, and nothing is wider than a phone."""
    other = {"light": "dark", "dark": "light"}[scheme]
    async with looking_at(browser, run_page, scheme) as sight:
        ground = "getComputedStyle(document.body).backgroundColor"
        grounds = {"light": "rgb(255, 255, 255)", "dark": "rgb(21, 23, 27)"}
        await sight.page.set_viewport_size({"width": 390, "height": 844})
        await until_it_fits(sight)
        await sight.page.get_by_role("button", name="Run").click()
        await sight.choose("t", "7")
        await until_it_fits(sight)
        await sight.press("Escape", "j", "j", "Enter")
        for view in "12345678":
            await sight.press(view)
            await until_it_fits(sight)
        await sight.press("2", "n", "f")
        await until_it_fits(sight)

        assert await sight.page.evaluate(ground) == grounds[scheme]
        await sight.press(*"dd" if scheme == "light" else "d")
        assert await sight.page.evaluate(ground) == grounds[other]


async def until_it_fits(sight: Sight) -> None:
    """Everything in sight can be read, and lies within the width of the page."""
    assert await sight.page.evaluate(CONTRASTS) == {}
    assert await sight.page.evaluate(TOO_WIDE) == []


async def test_keys_in_a_field_are_text(browser: Browser, run_page: Path):
    """A filter leaves the sessions that have its words; Escape closes, and then moves among sessions."""
    async with looking_at(browser, run_page) as sight:
        await sight.choose("/", "crashed")
        assert len(await sight.texts("#sessions .session")) == 1
        await sight.press("Enter")
        assert "session 3" in await sight.text("name")
        await sight.press("Escape")
        assert not await sight.page.is_visible("#session")
        await sight.press("/", "Control+a", "Delete", "Escape", "o")
        await sight.page.keyboard.type("finished")
        await sight.press("Escape", "j")
        assert await sight.texts("#sessions .session b") == ["0", "1", "2"]
        assert await sight.texts("#sessions .chosen b") == ["1"]
        await sight.press("Escape")
        assert len(await sight.texts("#sessions .session")) == 4


@pytest.mark.parametrize(
    ("field", "value", "numbers"),
    [
        ("filter", "must be left", ["2"]),
        ("filter", "games-1", ["2", "3"]),
        ("rewarded", "zero", ["1"]),
        ("rewarded", "none", ["3"]),
        ("role", "stray", ["0"]),
        ("weights", "2", ["1", "2"]),
        ("order", "worst", ["3", "2", "1", "0"]),
    ],
)
async def test_filters_leave_the_sessions_that_are_asked_for(
    browser: Browser, run_page: Path, field: str, value: str, numbers: list[str]
):
    """By what was said in a session and its metadata too."""
    async with looking_at(browser, run_page) as sight:
        if field == "filter":
            await sight.page.fill("#filter", value)
        else:
            await sight.page.select_option(f"#{field}", value)
        assert await sight.texts("#sessions .session b") == numbers


def hostile(value: Any) -> Any:
    """Put the hostile text in the place of every string, and a field of that name into every object."""
    if isinstance(value, dict):
        return {name: each if name == "session_id" else hostile(each) for name, each in value.items()}
    if isinstance(value, list):
        return [*map(hostile, value)]
    return HOSTILE if isinstance(value, str) else value


async def test_a_hostile_transcript_is_text(browser: Browser, tmp_path: Path):
    """Tags, escape sequences and marks of direction, in every field of a record: shown, written out, and never run."""
    session = new_session()
    first = take_turn(session, [user("Begin.")], HOSTILE)
    take_turn(session, [user("Begin."), first.reply, user(HOSTILE)], "Two.")
    record = hostile(session_record(session))
    named: Json = {HOSTILE: HOSTILE}
    for turn in record["turns"]:
        turn["reply"] |= {
            "reasoning_content": HOSTILE,
            "tool_calls": [{"id": HOSTILE, "function": {"name": HOSTILE, "arguments": HOSTILE}}],
        }
        turn["notes"] = {"error": {"code": HOSTILE, "cause": HOSTILE, "message": HOSTILE}, "tool_definitions": [named]}
        turn |= {"role": HOSTILE, "evidence": HOSTILE, "sampling": {"asked": named}, "dropped": HOSTILE}
    left = {"field": HOSTILE, "message": 0, "sent": HOSTILE, "recorded": HOSTILE}
    inherits: Json = {"session_id": HOSTILE, "before": 1, "turns": 1, "asked_again": 0, "ended_at": 1}
    inherits |= {"edits": [{"message": 0, "content": HOSTILE}], "because": HOSTILE, "difference": left}
    view = replace(SessionView.of(record), phase=HOSTILE, refusals={HOSTILE: 1}, remarks=[HOSTILE], metadata=named)
    view = replace(view, inherits=inherits)
    (tmp_path / "agent.log").write_text(HOSTILE, "utf-8")
    line = SessionLine(
        view.session_id,
        number=0,
        scenario=HOSTILE,
        outcome=HOSTILE,
        cause=HOSTILE,
        last_words=HOSTILE,
        reward=0.0,
        score={"figures": {HOSTILE: 1.0}, "reason": HOSTILE, "details": named},
        score_error=HOSTILE,
        agent_log=tmp_path / "agent.log",
        agent_result=named,
        inherits=HOSTILE,
    )
    run = RunView(
        HOSTILE,
        [line, replace(line, number=1)],
        suite=HOSTILE,
        status=HOSTILE,
        starts=[{"command": [HOSTILE]}],
        bands=[Band(HOSTILE, view.turns[0].created_at, None, HOSTILE)],
        steps=[{f"reward {HOSTILE}": 1.0}],
        audit={"verdicts": [HOSTILE], "groups": {HOSTILE: [{"gap": 1.0, "left": 0.5}]}},
        missing=[HOSTILE],
    )
    write_page(tmp_path / "run.html", Side(run, lambda _: view, toy_tokenizer()))
    written_out = "\\u{1b}[2J\\u{0}\\u{7} \\u{202e}right to left\\u{2066} \\u{2028} end"

    async with looking_at(browser, tmp_path / "run.html") as sight:
        assert "</script><script>owned = 1</script>" in await sight.text("facts")
        await sight.press("Enter")
        for element in ("title", "sessions", "name", "why", "conversation", "ending"):
            assert "</script><script>owned = 1</script>" in await sight.text(element)
            assert written_out in (await sight.page.text_content(f"#{element}") or "")
        await sight.press("2")
        assert written_out in "".join(await sight.texts(".token"))
        await sight.press("j", "7")
        assert "\\u{202e}right to left" in await sight.text("raw")
        for keys in ("1", "2", "n", "3", "4", "t", "5", "6", "7", "8", "Escape", "?"):
            await sight.press(keys)
            shown = await sight.page.evaluate("document.body.innerText")
            assert [char for char in shown if not char.isprintable() and char not in "\n\t"] == []
        assert await sight.page.evaluate("window.owned === undefined && document.querySelectorAll('img').length === 0")
        assert await sight.page.evaluate("document.scripts.length") == 7


async def test_text_of_both_directions_stays_in_its_place(browser: Browser, tmp_path: Path):
    """Letters from right to left are shown as such and move nothing beside them; zero width is written out."""
    said = "\u05e9\u05dc\u05d5\u05dd \u200bab\u200d \ufeff"
    session = new_session()
    take_turn(session, [user(said)], said)
    view = SessionView.of(session_record(session))
    line = SessionLine(view.session_id, number=0, scenario=said, outcome="finished", last_words=said, turns=1)
    write_page(tmp_path / "run.html", Side(RunView("run", [line]), lambda _: view, toy_tokenizer()))

    async with looking_at(browser, tmp_path / "run.html") as sight:
        [row] = await sight.texts("#sessions .session")
        assert row.startswith("0finished1 turn")
        lefts = "[...document.querySelectorAll('.session .line > *')].slice(0, 4).map((each) => each.offsetLeft)"
        assert (found := await sight.page.evaluate(lefts)) == sorted(found)
        await sight.press("Enter")
        assert (await sight.text("conversation")).count("\u05e9\u05dc\u05d5\u05dd \\u{200b}ab\\u{200d} \\u{feff}") == 2
        await sight.press("2")
        assert "\\u{200b}" in await sight.texts(".token")


async def test_scores_that_are_no_numbers_are_shown(browser: Browser, tmp_path: Path):
    """A check that returned NaN or a string has no say in means, bars and order."""
    why = "expected a number from check.py, got 'high'"
    scores: list[Json] = [
        {"reward": 0.5},
        {"reward": nan, "score": {"figures": {"format": -inf}, "details": {"note": nan, "grade": "high"}}},
        {"reward": None, "score_error": why},
    ]
    lines = [SessionLine(None, number=n, scenario="games", group=0, **score) for n, score in enumerate(scores)]
    write_page(tmp_path / "run.html", Side(RunView("run", lines), lambda _: SessionView.of({}), None))

    async with looking_at(browser, tmp_path / "run.html") as sight:
        assert await sight.text("verdict") == "3 sessions \u00b7 reward 0.5"
        assert await sight.texts("#sessions .reward") == ["0.5", "0.5", "nan", "\u2013"]
        await sight.press("s", "w", "Enter")
        assert await sight.texts("#sessions .session b") == ["1", "2", "0"]
        await sight.press("k", "k", "Enter", "6")
        score = await sight.text("score")
        assert all(words in score for words in ("reward\nnan", "format\n-inf", "note\nnan", "grade\nhigh"))
        await sight.press("J")
        assert f"none: {why}" in await sight.text("score")


async def test_a_page_that_is_opened_twice_keeps_its_theme(browser: Browser, run_page: Path):
    """Each window has its own session in sight; what was chosen of light and dark, the next one has from the start."""
    async with looking_at(browser, run_page) as sight:
        await sight.press("d", "d", "j", "Enter")
        other = await sight.page.context.new_page()
        await other.goto(run_page.as_uri())
        assert await other.evaluate("document.documentElement.dataset.theme") == "dark"
        assert not await other.is_visible("#session")
        assert "session 1" in await sight.text("name")


async def test_messages_of_no_known_form_are_shown(browser: Browser, tmp_path: Path):
    """Agents send what they like, and a damaged record has anything."""
    given: Json = {"turn": 0, "parent": None, "status": "completed", "reply": "said"}
    given["messages_delta"] = ["x", None, {"tool_calls": ["y", {"function": 7}]}, {"role": 5, "content": {"a": [1]}}]
    write_one(tmp_path / "run.html", TurnView.of(given))

    async with looking_at(browser, tmp_path / "run.html") as sight:
        await sight.press("Enter")
        assert '{"a":[1]}' in await sight.text("conversation")
        await sight.press("7")
        assert '"function": 7' in await sight.text("raw")


async def test_words_of_10_mb_are_cut_until_more_are_asked_for(browser: Browser, tmp_path: Path):
    """Beside more tokens than 2 bytes count, and in the text of one: the page still answers, by elements in sight."""
    length, words = 70_000, "x" * 10_000_000
    write_one(tmp_path / "run.html", long_turn(length, reply={"content": words}))
    text = (tmp_path / "run.html").read_text("ascii").replace("[0,null]", f"[0,{json.dumps(words)}]", 1)
    (tmp_path / "run.html").write_text(text, "ascii")

    async with looking_at(browser, tmp_path / "run.html") as sight:
        await sight.press("Enter", "2")
        assert 0 < len(await sight.texts(".token")) < 2_000
        await sight.press("1")
        more = sight.page.get_by_role("button", name="more of the 10000000 characters")
        assert len(await sight.text("conversation")) < 30_000
        await more.click()
        assert 200_000 < len(await sight.text("conversation")) < 230_000
        await sight.press("ArrowRight", "ArrowRight")
        assert (await sight.text("token")).split("\n")[:5] == ["token 1 of turn 0", "text", "no text", "id", "1"]
        await sight.press("f", "n")
        assert (await sight.text("token")).startswith("token 69990 of turn 0")
        assert (await sight.texts(".token.masked"))[0] == "#69990"


async def test_a_session_that_cannot_be_read_is_said_in_the_page(browser: Browser, run_page: Path):
    whole = viewed_sessions()
    damaged = SessionView.of(
        {
            "session_id": "1" * 32,
            "phase": "closed",
            "turns": [{"turn": 0, "parent": None, "status": "completed", "seconds": "nan"}],
        }
    )
    there = {"0" * 32: whole["0" * 32], "1" * 32: damaged}
    run = viewed_run(whole)
    lines = [*run.sessions, SessionLine(None, number=7, detail="no engine")]
    write_page(run_page, Side(replace(run, sessions=lines), partial(dict.__getitem__, there), None))

    async with looking_at(browser, run_page) as sight:
        facts = await sight.text("facts")
        for number in (1, 2):
            assert f"missing: session {str(number) * 32}: it is damaged" in facts
        await sight.press("j", "Enter")
        assert await sight.text("name") == "session 1 · finished"
        await sight.press("K")
        assert await sight.text("name") == "session 0 · finished"
        assert (await sight.texts("#sessions .session"))[-1] == "7no outcome\u2013no engine"


async def test_of_many_sessions_and_turns_those_in_sight_are_elements(browser: Browser, tmp_path: Path):
    """A key moves one line, and the list comes along."""
    one = viewed_sessions()["3" * 32]
    long = replace(one, turns=[replace(one.turns[0], index=n, parent=n - 1 if n else None) for n in range(5_000)])
    lines = [SessionLine(f"{number:032x}", number=number) for number in range(3_000)]

    def look_inside(session_id: str) -> SessionView:
        return long if int(session_id, 16) == 2_999 else SessionView(session_id, "open", [], 0, {}, {})

    write_page(tmp_path / "run.html", Side(RunView("run", lines), look_inside, toy_tokenizer()))

    async with looking_at(browser, tmp_path / "run.html") as sight:
        await sight.choose("/", "2999")
        await sight.press("/", "Control+a", "Delete", "Enter", "K", "J", "Enter")
        await sight.press("2", "3", "j")
        assert await sight.texts("#turns .chosen > span:first-child") == ["1"]
        counts = [
            len(await sight.texts(each)) for each in ("#sessions .session", "#lanes .lane", "#turns .row", ".token")
        ]
        assert all(0 < count < 1_500 for count in counts)
        assert await sight.texts("#sessions .chosen b") == ["2999"]
        await sight.press(*["k"] * 3)
        assert await sight.texts("#turns .chosen > span:first-child") == ["0"]
        assert 0 < len(await sight.texts("#conversation article")) <= 60
        await sight.press("2")
        strip = sight.page.locator("#strip")
        await strip.evaluate("(each) => { each.scrollTop = each.scrollHeight; }")
        await sight.page.locator("#strip .head", has_text="turn 4999").wait_for()


async def test_the_pictures_of_the_docs_show_the_page_as_it_is():
    """After a change of the page or of the run that it shows: `python -m tests.page_pictures`, and look at them."""
    assert DIGEST.read_text("ascii").strip() == page_digest()


async def test_the_pictures_of_the_docs_can_be_taken_again(browser: Browser, tmp_path: Path):
    """Each at its width, in light and dark, and small."""
    await take_pictures(browser, tmp_path)

    taken = sorted(tmp_path.iterdir())
    assert [path.name for path in taken] == sorted(path.name for path in PICTURES.glob("view-*.png"))
    for path in (*taken, *PICTURES.glob("view-*.png")):
        picture = path.read_bytes()
        assert picture[:8] == b"\x89PNG\r\n\x1a\n"
        assert int.from_bytes(picture[16:20]) == WIDTHS[path.stem.rpartition("-")[2]]
        assert len(picture) < 120_000


async def test_lives_and_forks_are_a_tree_with_links(browser: Browser, tmp_path: Path):
    """Each says how it left its record, in whatever words; a lost life and a session by itself are no links."""
    sessions, lost = dict(viewed_sessions()), SessionLine("f" * 32, number=0, outcome="crashed")
    view = viewed_run(sessions)
    life, fork, *others = view.sessions
    difference = {"message": 2, "field": "content", "recorded": "more", "sent": HOSTILE}
    told = {"turns": 1, "asked_again": 1, "edits": [], "ended_at": 1, "difference": None}
    for line, origin, left in (
        (life, lost.session_id, told | {"before": None, "because": "record"}),
        (fork, life.session_id, told | {"before": 1, "because": "difference", "difference": difference}),
    ):
        inherits = left | {"session_id": origin}
        sessions[str(line.session_id)] = replace(sessions[str(line.session_id)], inherits=inherits)
    lines = [replace(life, inherits=lost.session_id), replace(fork, inherits=life.session_id, forked_at=1), *others]
    side = Side(replace(view, sessions=lines, superseded=[lost]), lambda name: sessions[name], toy_tokenizer())
    write_page(tmp_path / "run.html", side)
    async with looking_at(browser, tmp_path / "run.html") as sight:
        await sight.press("Enter")
        until = "until turn 1: the record has no further answer"
        assert await sight.text("family") == f"family of 3 sessions, continues from ffffffff, {until}"
        await sight.page.locator("#family summary").click()
        rows = await sight.texts("#family .line")
        assert rows[0] == "0 · ffffffffcrashed"
        assert rows[1] == f"0 · 00000000this one, finished, reward 1, continues, {until}"
        assert rows[2].startswith("1 · 11111111finished, reward 0, forks turn 1, until turn 1: messages[2].content is")
        assert await sight.texts("#family button") == ["1 · 11111111"]
        await sight.page.locator("#family button").click()
        assert await sight.text("name") == "session 1 · finished"
        assert "fork at turn 1" in await sight.text("ending")
        for width in (WINDOW["width"], WIDTHS["narrow"]):
            await sight.page.set_viewport_size({**WINDOW, "width": width})
            assert await sight.page.evaluate(TOO_WIDE) == []
            assert await sight.page.evaluate(CONTRASTS) == {}
        await sight.press("Escape", "j", "Enter")
        assert await sight.text("name") == "session 2 · finished"
        assert not await sight.page.is_visible("#family")

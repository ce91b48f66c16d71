"""A sample and a rollout show themselves in a notebook: small, in its colors, and as text only.

That a run does is in tests/system/test_read_run.py.
"""

from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest

from harness import AgentTask, FunctionAgent, Rollout, SessionManager
from harness.engines.scripted import ScriptStep
from harness.notebook import card, table, token_bar
from harness.types import Json
from tests.browser import HOSTILE, browsing
from tests.session_servers.scripted import scripted_server


class Seen(HTMLParser):
    """Tags, attributes and text of a card."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.parts: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.parts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.parts)


async def ask_twice(base_url: str, prompt: str, **_: object) -> Json:
    """Two turns, the second of which continues the first."""
    messages: list[Json] = [{"role": "user", "content": prompt}]
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        for _ in range(2):
            answer = await client.post(f"{base_url}/chat/completions", json={"messages": messages})
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "Go on."}]
    return {"said": HOSTILE}


async def play(folder: Path) -> Rollout:
    """A rollout whose every field is hostile."""
    async with scripted_server(ScriptStep(text="Yes.")) as server, SessionManager(server.url) as manager:
        return await manager.run(AgentTask(FunctionAgent("ask", ask_twice), HOSTILE, folder, "m"))


def is_plain(seen: Seen) -> bool:
    """Whether a card has no other markup than its own, and no sign that moves what follows."""
    own = {"div", "span", "b", "small", "details", "summary", "table", "tr", "th", "td"}
    return seen.tags <= own and seen.attributes <= {"style", "title"} and not {*"\x00\x1b\u202e\u2066"} & {*seen.text}


async def test_a_rollout_and_its_sample_show_themselves(tmp_path: Path) -> None:
    """Words, counts by kind of token, and the end; what an agent says is text."""
    rollout = await play(tmp_path)
    [sample] = rollout.samples
    whole, one = Seen(rollout._repr_html_()), Seen(sample._repr_html_())

    trained = int(sample.loss_mask.sum())
    assert is_plain(whole)
    assert "Rollout: finished" in whole.text
    assert "Yes." in whole.text
    assert "onerror='owned = 1'" in whole.text
    assert is_plain(one)
    assert f"{trained:,} trained" in one.text
    assert f"{sample.tokens.size - trained:,} context" in one.text


def test_a_card_stays_small() -> None:
    """However long texts, tables and sessions are: 5,000 turns are a bar of their totals."""
    turns = ["context", "trained"] * 5_000
    html = card("x" * 10_000, {}, token_bar(turns), table(("n",), [(n,) for n in range(5_000)]))

    assert len(html) < 12_000
    assert "5,000 trained" in Seen(html).text
    assert "20 of 5,000 rows" in Seen(html).text


@pytest.mark.browser
async def test_a_browser_shows_it_on_light_and_dark(tmp_path: Path) -> None:
    """In the notebook's color, no wider than a telephone, and nothing of it is executed."""
    html = (await play(tmp_path))._repr_html_()
    async with browsing() as browser:
        page = await browser.new_page(viewport={"width": 390, "height": 800})
        for color in ("rgb(0, 0, 0)", "rgb(255, 255, 255)"):
            await page.set_content(f"<body style='color: {color}'>{html}</body>")
            assert await page.evaluate("getComputedStyle(document.querySelector('td')).color") == color
            assert await page.evaluate("document.documentElement.scrollWidth") <= 390
            assert await page.evaluate("typeof owned") == "undefined"

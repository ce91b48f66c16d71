"""The documentation as a site: it builds without a warning, and every link leads somewhere on the reader's machine."""

import subprocess
import sys
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urldefrag

import pytest
from playwright.async_api import TimeoutError as PlaywrightTimeout

from tests.browser import browsing
from tests.checkout import ROOT

pytestmark = pytest.mark.xdist_group("site")  # built once, on one worker

ANSWERS = {
    "run claude code on vllm": "examples/claude_code/index.html",
    "abort rollout keep samples": "docs/abort.html",
    "update weights running agents": "docs/weight-updates.html",
    "why reward 0": "docs/troubleshooting.html",
    "resume killed run": "docs/troubleshooting.html",
    "side call": "docs/samples.html",
    "fork at turn": "docs/going-on.html",
    "write check.py": "docs/scenarios.html",
    "train grpo": "docs/training.html",
    "teacher logprobs": "docs/teachers.html",
    "routed experts": "docs/replay.html",
    "lora": "docs/not-done.html",
}
"""What users type into the search, and the page that answers them."""
FIRST = 3
"""Hits that a reader looks at."""
FIRST_HITS = f"""[...document.querySelectorAll('.md-search-result__list > li')].slice(0, {FIRST}).map(
    hit => new URL(hit.querySelector('a').href).pathname)"""


class Found(NamedTuple):
    """What a page refers to, and what can be referred to in it."""

    links: set[str]
    loaded: set[str]
    """Scripts, styles, pictures: what a browser asks for by itself."""
    anchors: set[str]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found = Found(set(), set(), set())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        if "id" in values:
            self.found.anchors.add(values["id"])
        if tag == "a" and "href" in values:
            self.found.links.add(values["href"])
        elif tag == "link" and values.get("rel") != "canonical" and "href" in values:
            self.found.loaded.add(values["href"])
        elif "src" in values:
            self.found.loaded.add(values["src"])


@pytest.fixture(name="site", scope="module")
def _site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "docs/site/build.py", str(site)]
    built = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=250)
    assert built.returncode == 0, built.stdout + built.stderr
    return site


@pytest.fixture(name="pages", scope="module")
def _pages(site: Path) -> dict[Path, Found]:
    pages = {}
    for file in site.rglob("*.html"):
        reader = _Reader()
        reader.feed(file.read_text(encoding="utf-8"))
        pages[file] = reader.found
    return pages


def _is_elsewhere(address: str) -> bool:
    return address.startswith(("http:", "https:", "//", "mailto:"))


def test_every_page_of_the_repository_is_in_the_site(site: Path) -> None:
    """As a page, and as the Markdown that llms.txt names."""
    for page in (ROOT / "docs").rglob("*.md"):
        written = site / page.relative_to(ROOT)
        assert written.exists()
        assert written.with_name("index.html" if page.name == "README.md" else f"{page.stem}.html").exists()


def test_every_link_and_anchor_of_the_site_resolves(pages: dict[Path, Found]) -> None:
    broken = []
    for page, found in pages.items():
        for link in found.links - {""}:
            path, anchor = urldefrag(unquote(link))
            target = (page.parent / path).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            leads = target.exists() and (not anchor or target.suffix != ".html" or anchor in pages[target].anchors)
            if not _is_elsewhere(link) and not leads and page.name != "404.html":
                broken.append(f"{page.name}: {link}")
    assert broken == []
    assert sum(len(found.links) for found in pages.values()) > 1_000


def test_a_reader_without_a_network_sees_the_site(pages: dict[Path, Found]) -> None:
    """No font, script or picture is asked for at another machine."""
    loaded = {(page, address) for page, found in pages.items() for address in found.loaded if page.name != "404.html"}
    assert [address for _, address in loaded if _is_elsewhere(address)] == []
    assert [address for page, address in loaded if not (page.parent / urldefrag(unquote(address))[0]).exists()] == []


async def test_the_search_answers_what_users_ask(site: Path) -> None:
    """Each of twelve questions, within the first three hits, on a page that is opened from a folder."""
    async with browsing() as browser:
        page = await browser.new_page()
        await page.goto((site / "docs" / "index.html").as_uri())
        await page.wait_for_function("typeof IFrameWorker === 'function'")
        await page.keyboard.press("/")
        field, found = page.locator(".md-search__input"), {}
        for asked, answer in ANSWERS.items():
            await field.fill("")
            await page.wait_for_function(f"{FIRST_HITS}.length === 0")
            await field.fill(asked[:-1])
            await field.press(asked[-1])
            with suppress(PlaywrightTimeout):  # hits come while words do
                answered = f"{FIRST_HITS}.some(path => path.endsWith({answer!r}))"
                await page.wait_for_function(answered, timeout=20_000)
            found[asked] = await page.evaluate(FIRST_HITS)
    assert {asked: hits for asked, hits in found.items() if not any(h.endswith(ANSWERS[asked]) for h in hits)} == {}
    assert len(ANSWERS) == 12


def test_every_link_of_llms_txt_is_in_the_site(site: Path) -> None:
    """Each line has one, and says in a line what is behind it."""
    lines = (site / "docs/llms.txt").read_text(encoding="utf-8").splitlines()
    links = [line.partition("](")[2].partition(")")[0] for line in lines if line.startswith("- ")]
    assert lines[0].startswith("# ")
    assert lines[2].startswith("> ")
    assert [link for link in links if not (site / "docs" / link).exists()] == []
    assert len(links) > 30


def test_the_public_names_have_their_docstrings(pages: dict[Path, Found]) -> None:
    """The page of Python has an anchor for each name of docs/api.md."""
    [public] = [found for page, found in pages.items() if page.name == "public-names.html"]
    assert {"harness.SessionManager", "harness.abort_rollout", "harness.training.TorchLearner"} <= public.anchors

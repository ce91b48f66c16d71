"""A page in a real browser: the Chromium of the system, headless, which playwright drives and never downloads.

`looking_at` watches what the page does while a test reads it: messages on the console, errors of the script, violations
of the content security policy, dialogs, and every address that is asked for. There must be none of them; a page that is
live asks below its own address.
"""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest
from playwright.async_api import Browser, Page, async_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--no-sandbox",  # tests of CI run as root, and the pages are ours
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--font-render-hinting=none",
)
_WATCH_POLICY = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) =>
  window.violations.push(event.violatedDirective + " " + event.blockedURI));
"""
PATIENCE_S = 30.0
HOSTILE = (
    "</script><script>owned = 1</script><!--<script><img src=x onerror='owned = 1'>]]> &lt;b&gt;"
    " \x1b[2J\x00\x07 \u202eright to left\u2066 \u2028 end"
)
"""Of an agent or a model that tries to be more than text."""
WINDOW = {"width": 1200, "height": 900}


@asynccontextmanager
async def browsing() -> AsyncIterator[Browser]:
    """A browser with a profile of its own, which goes with it."""
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        reason = "expected Chromium on PATH, found none of " + ", ".join(_NAMES) + ": run .ci/install_chromium as root"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=program, args=list(_FLAGS))
        try:
            yield browser
        finally:
            await browser.close()


class Sight:
    """What there is to see of a page, and what it did that it should not."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.wrongs: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda message: self.wrongs.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: self.wrongs.append(f"error: {error}"))
        page.on("dialog", lambda dialog: self.wrongs.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: self.asked.append(request.url))

    async def press(self, *keys: str) -> None:
        """Press keys, one after the other."""
        for key in keys:
            await self.page.keyboard.press(key)

    async def choose(self, key: str, words: str) -> None:
        """By keys alone: the field of `key`, the option or the text that begins with `words`, and back to the page."""
        await self.press(key)
        await self.page.keyboard.type(words)
        await self.press("Enter")

    async def text(self, element: str) -> str:
        """The text of an element that is in sight, by its id; empty while it is hidden."""
        return await self.page.inner_text(f"#{element}")

    async def until(self, element: str, words: str) -> None:
        """Return once the element, by its id, says these words; a page that is live says them later."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while words not in await self.text(element):  # the policy of the page forbids its own
                    await asyncio.sleep(0.03)
        except TimeoutError:
            pytest.fail(f"#{element} never said {words!r}: {await self.text(element)!r}; {self.wrongs}")

    async def texts(self, selector: str) -> list[str]:
        """The text of every such element."""
        return await self.page.locator(selector).all_text_contents()


@asynccontextmanager
async def looking_at(
    browser: Browser, place: Path | str, scheme: Literal["light", "dark"] = "light"
) -> AsyncIterator[Sight]:
    """The page in a file or at a URL; nothing was wrong with it when the block has ended."""
    address = place if isinstance(place, str) else place.as_uri()
    context = await browser.new_context(viewport=WINDOW, color_scheme=scheme)  # type: ignore[arg-type]
    try:
        page = await context.new_page()
        await page.add_init_script(_WATCH_POLICY)
        sight = Sight(page)
        await page.goto(address)
        yield sight
        assert sight.wrongs == []
        assert await page.evaluate("window.violations") == []
        if isinstance(place, str):
            assert [url for url in sight.asked if not url.startswith(address)] == []
        else:
            assert sight.asked == [address]
    finally:
        await context.close()

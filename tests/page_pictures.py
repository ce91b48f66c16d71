"""The pictures of the viewer's page in the docs, taken in Chromium; and of which pages they were taken.

    python -m tests.page_pictures

A browser of another version, or other fonts, draw other pixels: not those say whether a picture is current, but the
digest of the pages that it shows, with their style, script and data, which stands beside the pictures.
"""

import asyncio
import hashlib
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from playwright.async_api import Browser

from harness.rollouts.client.connections import SessionServerAddress
from harness.server.settings import ServerSettings
from harness.viewer.live.live_page import serve_live
from tests.browser import browsing, looking_at
from tests.builders import user
from tests.checkout import ROOT
from tests.session_servers.served import says, serving
from tests.viewed_run import write_viewed_diff, write_viewed_run, write_viewed_training

PICTURES = ROOT / "docs" / "images"
DIGEST = PICTURES / "view.sha256"
WIDTHS: Mapping[str, int] = {"wide": 1440, "narrow": 390}
"""Of a picture, in pixels, by the end of its name."""

_HEIGHTS = {"wide": 600, "narrow": 720}
_PAGES = {"run": write_viewed_run, "training": write_viewed_training, "diff": write_viewed_diff}
# Keys before a picture: session 2 with its dropped tokens, the first pair compared; a phone shows one pane.
_KEYS: Mapping[str, tuple[str, ...]] = {
    "run-wide": ("j", "j", "Enter", "f", "n", "n"),
    "run-narrow": ("Enter", "j"),
    "training-wide": (),
    "training-narrow": ("t", "Escape"),
    "diff-wide": ("Enter",),
    "diff-narrow": ("Enter",),
    "live-wide": ("Enter",),
    "live-narrow": ("t", "Escape"),
}
_SCHEMES: Mapping[str, Literal["light", "dark"]] = {
    **dict.fromkeys(("run-narrow", "training-wide", "diff-narrow", "live-wide"), "dark")
}


def page_digest() -> str:
    """Of the pages that the pictures show, as they are made now."""
    digest = hashlib.sha256()
    with TemporaryDirectory() as folder:
        for name, write in _PAGES.items():
            page = Path(folder) / f"{name}.html"
            write(page)
            digest.update(page.read_bytes().replace(folder.encode(), b""))
    return digest.hexdigest()


async def take_pictures(browser: Browser, folder: Path) -> None:
    """Put `view-PAGE-WIDTH.png` into `folder`, half of them dark."""
    with TemporaryDirectory() as scratch:
        for name, write in _PAGES.items():
            write(page := Path(scratch) / f"{name}.html")
            for width in WIDTHS:
                await _take(browser, page, f"{name}-{width}", folder)
    settings = ServerSettings(admin_token="operator")
    async with serving(*says("Is it 10?", "Is it 15?"), settings=settings) as client:
        for _ in range(2):
            session = await client.create()
            first = await client.say(session, [user("Guess my number.")])
            await client.say(session, [user("Guess my number."), first, user("Too low.")])
        async with serve_live(SessionServerAddress(client.url, "operator")) as live:
            for width in WIDTHS:
                await _take(browser, live.url, f"live-{width}", folder, awaited=session.session_id[:8])


async def _take(browser: Browser, page: Path | str, name: str, folder: Path, awaited: str = "") -> None:
    width = name.rpartition("-")[2]
    async with looking_at(browser, page, _SCHEMES.get(name, "light")) as sight:
        await sight.page.set_viewport_size({"width": WIDTHS[width], "height": _HEIGHTS[width]})
        await sight.until("sessions", awaited)
        await sight.press(*_KEYS[name])
        if awaited and "Enter" in _KEYS[name]:
            await sight.until("conversation", "Is it")
        await sight.page.screenshot(path=folder / f"view-{name}.png")


async def main() -> None:
    """Take them for the docs."""
    PICTURES.mkdir(exist_ok=True)
    async with browsing() as browser:
        await take_pictures(browser, PICTURES)
    DIGEST.write_text(page_digest() + "\n", "ascii")


if __name__ == "__main__":
    asyncio.run(main())

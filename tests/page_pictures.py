"""The pictures of the viewer's page in the docs, taken in Chromium; and of which page they were taken.

    python -m tests.page_pictures

A browser of another version, or other fonts, draw other pixels: not those say whether a picture is current, but the
digest of the page that it shows, with its style, its script and its data, which stands beside the pictures.
"""

import asyncio
import hashlib
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.async_api import Browser

from tests.browser import browsing, looking_at
from tests.checkout import ROOT
from tests.viewed_run import write_viewed_run

PICTURES = ROOT / "docs" / "images"
DIGEST = PICTURES / "view.sha256"
WIDTH = 1200
"""Of a picture, in pixels."""

_HEIGHT = 560


def page_digest() -> str:
    """Of the page that the pictures show, as it is made now."""
    with TemporaryDirectory() as folder:
        page = Path(folder) / "run.html"
        write_viewed_run(page)
        return hashlib.sha256(page.read_bytes()).hexdigest()


async def take_pictures(browser: Browser, folder: Path) -> None:
    """Put `view-light.png` and `view-dark.png` into `folder`: the forked session is open, its dropped tokens found."""
    with TemporaryDirectory() as scratch:
        page = Path(scratch) / "run.html"
        write_viewed_run(page)
        for scheme in ("light", "dark"):
            async with looking_at(browser, page, scheme) as sight:
                await sight.page.set_viewport_size({"width": WIDTH, "height": _HEIGHT})
                await sight.choose("t", "7")
                await sight.press("j", "j", "Enter", "j")
                await sight.choose("f", "other_sample")
                await sight.press("n")
                await sight.page.screenshot(path=folder / f"view-{scheme}.png", full_page=True)


async def main() -> None:
    """Take them for the docs."""
    PICTURES.mkdir(exist_ok=True)
    async with browsing() as browser:
        await take_pictures(browser, PICTURES)
    DIGEST.write_text(page_digest() + "\n", "ascii")


if __name__ == "__main__":
    asyncio.run(main())

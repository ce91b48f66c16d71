"""What tests of the viewer share."""

from collections.abc import AsyncIterator

import pytest_asyncio
from playwright.async_api import Browser

from tests.browser import browsing


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="browser")
async def _browser() -> AsyncIterator[Browser]:
    async with browsing() as browser:
        yield browser

"""What tests of the session server share."""

from collections.abc import Iterator
from typing import Any

import pytest
import structlog


@pytest.fixture(name="quiet_logs")
def _quiet_logs() -> Iterator[None]:
    """State machines do in a second what a server does in a day: nobody reads its log."""
    structlog.configure(processors=[_drop])
    yield
    structlog.reset_defaults()


def _drop(logger: Any, method: str, event: Any) -> Any:
    raise structlog.DropEvent

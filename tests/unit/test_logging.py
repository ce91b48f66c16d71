"""Log lines go to standard error, and what is served does not depend on who takes them."""

import sys
from collections.abc import Iterator

import pytest
import structlog

from harness.telemetry.logging import configure_logging


@pytest.fixture(autouse=True)
def _own_configuration() -> Iterator[None]:
    """Other tests log as they did before."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def test_a_line_has_its_level_and_its_values(capsys: pytest.CaptureFixture[str]) -> None:
    """One line of JSON where nobody looks at a terminal."""
    configure_logging()
    structlog.get_logger().warning("turn_ended", end="drained")

    assert '"end": "drained"' in capsys.readouterr().err


class NobodyReads:
    """A pipe whose other end is closed."""

    def isatty(self) -> bool:
        return False

    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError


@pytest.mark.parametrize("level", ["info", "warning", "error", "critical"])
def test_a_line_that_nobody_takes_raises_nothing(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`harness serve 2>&1 | head` serves on."""
    monkeypatch.setattr(sys, "stderr", NobodyReads())
    configure_logging()

    getattr(structlog.get_logger(), level)("turn_ended")

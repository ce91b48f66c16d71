"""What agents and models say, on the terminal of whoever runs them."""

import io
import sys

import pytest

from harness.machine.log import get_logger
from harness.server.telemetry.logging import configure_logging
from harness.server.telemetry.printable import printable

HOSTILE = "/sessions/\x1b[2J\x07\x9b1A\r/v1"


class Terminal(io.StringIO):
    """Remembers what was written to it."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch):
    """Standard error of a process that logs."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    configure_logging()
    return sys.stderr


def test_a_log_moves_no_cursor(terminal: Terminal):
    """A path is the client's: what a terminal obeys is written out, and a long one is cut."""
    log = get_logger("harness.server.app")
    log.info("request_refused", path=HOSTILE)
    log.info("request_refused", path="x" * 1_000_000)

    assert r"/sessions/\x1b[2J\x07\x9b1A\r/v1" in terminal.getvalue()
    assert "\x1b[2J" not in terminal.getvalue()
    assert len(terminal.getvalue()) < 20_000


@pytest.mark.parametrize("is_plain", [False, True])
def test_a_person_reads_a_line_for_each_event(terminal: Terminal, monkeypatch: pytest.MonkeyPatch, *, is_plain: bool):
    """Its time, level and name before its values, and an exception below; in colors, unless nobody wants those."""
    if is_plain:
        monkeypatch.setenv("NO_COLOR", "1")
    get_logger("harness.server.app").error("request_failed", path="/v1", of={"a": 1}, exc_info=ValueError("odd"))

    first, last = terminal.getvalue().splitlines()
    assert last == "ValueError: odd"
    assert first.endswith(" path=/v1 of={'a': 1}")
    assert ("\x1b[31merror   \x1b[0m \x1b[1mrequest_failed\x1b[0m" in first) is not is_plain
    assert is_plain is (" error    request_failed path" in first)


@pytest.mark.parametrize("value", ["x\n2026-01-01T00:00:00Z error    store_writer_ended", "a b", "a=b", "", "'"])
def test_a_value_forges_no_other_and_no_line(terminal: Terminal, value: str):
    """Clients choose names of holds, engines the words of their errors."""
    get_logger("harness.server.app").info("gate_hold_placed", holder=value, kind="pause")

    assert f" holder={value!r} kind=pause\n" in terminal.getvalue()
    assert terminal.getvalue().count("\n") == 1


def test_what_people_write_stays_as_it_is():
    """In any script, with its line breaks."""
    assert printable("größer\n\t猜一个数 🙂") == "größer\n\t猜一个数 🙂"

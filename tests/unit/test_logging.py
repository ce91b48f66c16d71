"""Log lines go to standard error, and what is served does not depend on who takes them."""

import json
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import structlog

from harness.telemetry.logging import configure_logging


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


def test_a_pipe_that_nobody_reads_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that starts a server and never reads its standard error; lines for which there is room are whole."""

    def write_many() -> None:
        log = structlog.get_logger()
        for number in range(5_000):
            log.info("turn_ended", turn=number)
        log.info("request_failed", exception="ü" * 50_000)

    read, write = os.pipe()
    with os.fdopen(read, encoding="utf-8") as reader, os.fdopen(write, "w", encoding="utf-8") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        configure_logging()
        writing = threading.Thread(target=write_many, daemon=True)
        writing.start()
        writing.join(10)
        is_held_up = writing.is_alive()
        first = [json.loads(reader.readline())["turn"] for _ in range(100)]

    assert not is_held_up
    assert first == list(range(100))


def test_a_reader_that_comes_back_gets_what_is_written_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines in between are lost."""
    read, write = os.pipe()
    with os.fdopen(write, "w", encoding="utf-8") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        configure_logging()
        log = structlog.get_logger()
        for number in range(2_000):
            log.info("turn_ended", turn=number)
        missed = os.read(read, 1 << 20)
        log.info("back")
    with os.fdopen(read, "rb") as reader:
        rest = reader.read()

    assert len(missed) < 2_000 * 50
    assert b'"back"' in rest


def test_lines_of_several_threads_are_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Long ones, too, which are written in pieces."""

    def write_some(number: int) -> None:
        for _ in range(20):
            structlog.get_logger().info("turn_ended", thread=number, text=str(number) * 9_000)

    log = tmp_path / "log"
    with log.open("w", encoding="utf-8") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        configure_logging()
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(write_some, range(4)))

    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 80
    assert all(line["text"] == str(line["thread"]) * 9_000 for line in lines)

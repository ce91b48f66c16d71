"""Log lines go to standard error, and what is served does not depend on who takes them."""

import asyncio
import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.machine.log import bound, get_logger
from harness.server.telemetry.logging import configure_logging
from server_patch.router.passthrough import log as passthrough_log

LOGGER = "harness.server.turns"


def test_a_line_has_its_level_and_its_values(capsys: pytest.CaptureFixture[str]) -> None:
    """One line of JSON where nobody looks at a terminal."""
    configure_logging()
    get_logger(LOGGER).warning("turn_ended", end="drained")

    assert '"end": "drained"' in capsys.readouterr().err


class Terminal(io.StringIO):
    """What an operator looks at."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_readable_line_for_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """How it ended, and why; hostile text is written out."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("NO_COLOR", "1")
    configure_logging()
    log = get_logger(LOGGER)
    facts = {"dialect": "openai_chat", "turn": 3, "attempt": 0, "gate_s": 0.0, "queue_s": 0.25, "engine_s": 1.0}
    with bound(session_id="5f0c1d2e" * 4):
        log.info("turn_ended", end="model", status="completed", tokens=84, **facts)
        error = {"code": "engine_unavailable", "error": "it is \x1b[2J gone"}
        log.info("turn_ended", end="engine_failed", status="failed", tokens=0, **facts, **error)
    first, second = sys.stderr.getvalue().splitlines()  # type: ignore[attr-defined]  # of the terminal above

    assert re.fullmatch(r"\d\d:\d\d:\d\d 5f0c1d2e turn 3: completed by model, 84 tokens in 1.25 s", first)
    assert second.endswith("failed by engine_failed, 0 tokens in 1.25 s; engine_unavailable: it is \\x1b[2J gone")


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

    getattr(get_logger(LOGGER), level)("turn_ended")


def test_a_pipe_that_nobody_reads_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that starts a server and never reads its standard error; lines for which there is room are whole."""

    def write_many() -> None:
        log = get_logger(LOGGER)
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
        log = get_logger(LOGGER)
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
            get_logger(LOGGER).info("turn_ended", thread=number, text=str(number) * 9_000)

    log = tmp_path / "log"
    with log.open("w", encoding="utf-8") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        configure_logging()
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(write_some, range(4)))

    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 80
    assert all(line["text"] == str(line["thread"]) * 9_000 for line in lines)


EMBEDDED = """
import asyncio, logging, sys
from harness import MemoryStore, Script, ScriptedEngine, ServerSettings, serve
from harness.lab.models.tokenizer_files import write_small_tokenizer
from harness.tokens.model_family import open_chat_tokenizer
from pathlib import Path
if sys.argv[2:]:
    logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
async def serve_for_a_moment():
    chat = open_chat_tokenizer(write_small_tokenizer(Path(sys.argv[1])))
    async with serve(ScriptedEngine(chat.tokenizer, Script(())), chat, MemoryStore(), ServerSettings()):
        pass
asyncio.run(serve_for_a_moment())
"""


def _embed(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", EMBEDDED, str(tmp_path / "tokenizer"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True)


def test_a_program_that_embeds_a_server_has_its_output_to_itself(tmp_path: Path) -> None:
    """A server without a token warns, and a trainer's standard output is none of our business."""
    done = _embed(tmp_path)

    assert (done.stdout, done.stderr) == ("", "")


def test_a_program_that_listens_is_told(tmp_path: Path) -> None:
    """By `logging`, as of every library: a line with the name of the event and its values."""
    done = _embed(tmp_path, "listens")

    assert done.stdout == ""
    assert "harness.server.serving WARNING server_is_open url='http://127.0.0.1:" in done.stderr


def test_an_exception_is_told_behind_the_event(caplog: pytest.LogCaptureFixture) -> None:
    """With where it was raised."""
    try:
        raise OSError("no such device")
    except OSError:
        get_logger(LOGGER).exception("store_failed", path="x")

    [record] = caplog.records
    event, *rest = record.getMessage().splitlines()
    assert (record.name, event, rest[0]) == (LOGGER, "store_failed path='x'", "Traceback (most recent call last):")
    assert rest[-1] == "OSError: no such device"


def test_an_exception_that_is_not_there_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    """Somebody asks for the one at hand where there is none."""
    get_logger(LOGGER).error("store_failed", exc_info=True)

    assert [record.getMessage() for record in caplog.records] == ["store_failed"]


def test_what_a_library_logs_in_our_name_is_a_line_like_ours(capsys: pytest.CaptureFixture[str]) -> None:
    """uvicorn, say, of a handler that raised."""
    configure_logging()
    logging.getLogger("harness.machine.http_bounds").error("Exception in %s", "ASGI", exc_info=ValueError("odd"))

    line = json.loads(capsys.readouterr().err)
    assert (line["event"], line["level"], line["exception"]) == ("Exception in ASGI", "error", "ValueError: odd")


def test_what_runs_beside_other_peoples_servers_logs_its_values_too(capsys: pytest.CaptureFixture[str]) -> None:
    """It knows nothing of the harness, and says them by `extra`."""
    configure_logging()
    passthrough_log.info("gateway_started", extra={"gateway": "http://127.0.0.1:1", "kind": "smg"})

    line = json.loads(capsys.readouterr().err)
    assert (line["event"], line["gateway"], line["kind"]) == ("gateway_started", "http://127.0.0.1:1", "smg")
    assert "lineno" not in line


def test_a_level_is_written_from_there_on(capsys: pytest.CaptureFixture[str]) -> None:
    """Configured twice, each line is there once."""
    configure_logging()
    configure_logging("warning")
    log = get_logger(LOGGER)
    log.info("turn_ended")
    log.warning("turn_dropped", of={"a": Path("/x")})

    [line] = capsys.readouterr().err.splitlines()
    assert json.loads(line)["event"] == "turn_dropped"


async def test_values_are_bound_to_a_block_and_to_what_begins_in_it(caplog: pytest.LogCaptureFixture) -> None:
    """Those of an inner block win, and those of the event itself; another task has its own."""
    log = get_logger(LOGGER)
    caplog.set_level(logging.INFO)

    async def begin() -> None:
        with bound(turn=2):
            log.info("inner", end="model")

    with bound(session_id="a", turn=1):
        beside = asyncio.create_task(begin())
        log.info("own", turn=3)
        await beside
        log.info("outer")
    log.info("after")

    assert [record.getMessage() for record in caplog.records] == [
        "own session_id='a' turn=3",
        "inner session_id='a' turn=2 end='model'",
        "outer session_id='a' turn=1",
        "after",
    ]


def test_rich_is_not_loaded_with_structlog() -> None:
    """It costs a server 5 MiB and 100 modules; what loads it afterwards finds it."""
    code = "import sys, harness.machine.log; before = 'rich' in sys.modules; import rich; print(before, rich.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["False", "rich"]


def test_the_configuration_of_structlog_stays_the_embedding_programs() -> None:
    """Our loggers neither change it nor follow it."""
    code = (
        "import logging, structlog; structlog.configure(processors=[lambda *_: 1 / 0]);"
        "from harness.machine.log import get_logger; logging.basicConfig(format='%(message)s');"
        "get_logger('harness.x').warning('told', turn=1); print(len(structlog.get_config()['processors']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert (done.stderr, done.stdout) == ("told turn=1\n", "1\n")


def test_an_event_that_nobody_listens_to_is_not_made(caplog: pytest.LogCaptureFixture) -> None:
    """Its values are not even looked at."""
    caplog.set_level(logging.WARNING)
    get_logger(LOGGER).info("turn_ended", exc_info=True)

    assert caplog.records == []

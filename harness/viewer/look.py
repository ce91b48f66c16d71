"""Views of a run directory or store, and of a running server's sessions. Reading writes and locks nothing.

A run may be in progress, killed, or of an older version or another machine. Each part is read separately: a missing or
damaged part is a sentence in `RunView.missing`. Sessions of a server may change or end meanwhile.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from msgspec import Struct, to_builtins

from harness.decoding import convert
from harness.errors import HarnessError, RunError, SessionServerError
from harness.rollouts.agents.agent_environment import LOG_FILE
from harness.rollouts.agents.agent_output import read_last_lines
from harness.rollouts.client.connections import SessionServerAddress
from harness.rollouts.client.session_server import GREETING_S, ServerDescription, SessionServerClient, ask_server
from harness.server.store.rows import StoredLine, TokenizerName
from harness.server.store.sqlite import list_sessions, read_hold_times, read_session
from harness.sessions.record import session_record
from harness.suite.faults.firing import FaultLog
from harness.suite.judge.accounting import ledger_of
from harness.suite.record.attached_sessions import read_attached_record
from harness.suite.record.config import RunConfig
from harness.suite.record.rollout_table import RolloutRecord, read_rollouts, read_superseded
from harness.suite.record.rundir import RunDirectory, read_lock
from harness.suite.run.audited import read_audit
from harness.suite.training.report import TELEMETRY_FILE, read_telemetry
from harness.tokens.tokenizer import Tokenizer
from harness.types import Json
from harness.viewer.live.live_reading import live_line
from harness.viewer.run_view import Band, RunView, SessionLine, hold_band, say_missing
from harness.viewer.session_view import SessionView

_LOG_LINES = 5
"""Last lines of an agent's log that a session shows."""

_T = TypeVar("_T")


def look_at(path: Path, tokenizer: Path | None = None) -> RunView:
    """Return the view of a run directory or store, with the tokenizer in `tokenizer`, else its own.

    Raises `RunError` for another path, `StoreError` for a bad store, `TokenizerError` for a folder without one.
    """
    if path.is_dir():
        return _look_at_run(RunDirectory(path), tokenizer)
    if not path.is_file():
        raise RunError(f"expected a run directory or the file of a store, found nothing at {path}")
    stored = list(list_sessions(path).values())
    missing: list[str] = []
    bands: list[Band] = []
    with say_missing("its pauses", missing):
        bands = _hold_bands(path)
    names = {each.tokenizer for each in stored if each.tokenizer.name}
    if len(names) > 1:
        missing.append(f"one tokenizer: its sessions have {len(names)}, so the same id may be another text")
    recorded = stored[-1].tokenizer if stored else TokenizerName()
    folder = find_tokenizer(recorded, tokenizer, missing) if stored else tokenizer
    return RunView(str(path), list(map(SessionLine.of_stored, stored)), tokenizer=folder, bands=bands, missing=missing)


def look_into(path: Path, session_id: str) -> SessionView:
    """Return a session of a run or store. Raises `StoreError` if it is missing or damaged."""
    database = RunDirectory(path).database if path.is_dir() else path
    record: Json | None = None
    if path.is_dir():
        record = read_attached_record(database, session_id)
    if record is None:
        record = session_record(read_session(database, session_id))
    return SessionView.of(record)


def open_tokenizer(view: RunView) -> Tokenizer | None:
    return None if view.tokenizer is None else Tokenizer.load(view.tokenizer)


def find_tokenizer(recorded: TokenizerName, named: Path | None, missing: list[str]) -> Path | None:
    """Return `named`, else the recorded tokenizer's folder. Adds to `missing`. Raises `TokenizerError`."""
    folder = named or (Path(recorded.name) if recorded.name else None)
    if folder is None:
        missing.append("its tokenizer: not recorded; name it with --tokenizer")
        return None
    try:
        digest = Tokenizer.load(folder).digest
    except (HarnessError, OSError):
        if named is not None:
            raise
        missing.append(f"its tokenizer: the folder {folder} is not on this machine; name it with --tokenizer")
        return None
    if recorded.digest and digest != recorded.digest:
        missing.append(
            f"its tokenizer: that in {folder} has changed or is another one, and texts of tokens may be wrong"
        )
    return folder


def _look_at_run(directory: RunDirectory, named: Path | None) -> RunView:
    if not directory.config.is_file() and not directory.database.is_file():
        raise RunError(
            f"{directory.path} is not a run directory: it has neither {directory.config.name} nor"
            f" {directory.database.name}"
        )
    missing: list[str] = []

    def read(what: str, reading: Callable[[], _T], otherwise: _T, file: Path | None = None, why: str = "") -> _T:
        answer = otherwise
        if file is not None and not file.is_file():
            missing.append(f"{what}: there is no {file.name}{why}")
            return answer
        with say_missing(what, missing):
            answer = reading()
        return answer  # noqa: RET504  # the block may end without one

    def read_stored(what: str, reading: Callable[[], _T], otherwise: _T) -> _T:
        return read(what, reading, otherwise) if database.is_file() else otherwise

    database = directory.database
    config: RunConfig | None = read("its configuration", lambda: RunConfig.load(directory.config), None)
    stopped = ", so it was stopped before its engine ran"
    lock: _Lock = read(
        "what it ran with", lambda: convert(read_lock(directory.lock), _Lock), _Lock(), directory.lock, stopped
    )
    unfinished = ", so it is in progress, or was stopped"
    status: str | None = read(
        "its report", lambda: directory.read_result()["status"], None, directory.result, unfinished
    )
    bands: list[Band] = read("its faults", lambda: _fault_bands(directory), [])
    audit: Json = read("its audit", lambda: read_audit(directory) or {}, {})
    pauses: list[Band] = read_stored("its pauses", lambda: _hold_bands(database), [])
    stored: dict[str, StoredLine] = read("its sessions", lambda: list_sessions(database), {}, database)
    earlier: set[str | None] = read_stored("its earlier attempts", lambda: read_superseded(database), set())
    rollouts: dict[int, RolloutRecord] = read_stored("its rollouts", lambda: read_rollouts(database), {})
    final = [rollout for rollout in rollouts.values() if rollout.is_final]
    ledger: Json | None = read_stored("its ledger", lambda: ledger_of(database, final).to_json(), None)
    # Several engines have the tokenizer of one model, so take the first.
    key, folder = next(iter(lock.tokenizers.items()), ("", None))
    recorded = TokenizerName(folder, lock.digests.get(key, {}).get("tokenizer_digest"))
    tokenizer = find_tokenizer(recorded, named, missing)
    steps: list[dict[str, float]] = []
    if (directory.path / TELEMETRY_FILE).is_file():
        steps = read("its training steps", lambda: read_telemetry(directory, sys.maxsize), steps)
    lines = [_line(directory, rollout, stored.get(str(rollout.session_id))) for rollout in rollouts.values()]
    known = {line.session_id for line in lines}
    others = [SessionLine.of_stored(each) for session_id, each in stored.items() if session_id not in known]
    lines += [line for line in others if line.session_id not in earlier]
    return RunView(
        source=str(directory.path),
        sessions=lines,
        status=status,
        suite=None if config is None else config.suite,
        starts=[to_builtins(start) for start in lock.starts],
        versions=lock.versions,
        tokenizer=tokenizer,
        ledger=ledger,
        audit=audit,
        bands=sorted([*bands, *pauses], key=lambda band: band.begin),
        steps=steps,
        missing=missing,
        superseded=[line for line in others if line.session_id in earlier],
    )


def _hold_bands(store: Path) -> list[Band]:
    return [hold_band(hold) for hold in read_hold_times(store)]


def _fault_bands(directory: RunDirectory) -> list[Band]:
    return [
        Band("fault", firing.at, firing.at, f"{firing.action}, {firing.problem or firing.did or 'under way'}")
        for firing in FaultLog(directory.faults).read()
        if firing.at is not None
    ]


class _Start(Struct):
    at: float
    command: list[str]


class _Lock(Struct):
    versions: dict[str, str | None] = {}
    digests: dict[str, Json] = {}
    starts: list[_Start] = []
    tokenizers: dict[str, str] = {}


def _line(directory: RunDirectory, rollout: RolloutRecord, stored: StoredLine | None) -> SessionLine:
    log = directory.workdir(rollout.number) / LOG_FILE
    said = read_last_lines(log, _LOG_LINES)
    line = SessionLine.of(rollout, None if said is None else log, said or ())
    return line if stored is None else line.with_origin(stored)


def look_at_server(address: SessionServerAddress, tokenizer: Path | None = None) -> RunView:
    """Return the server's sessions and hold times. Raises `SessionServerError`, `TokenizerError`."""

    async def look(server: SessionServerClient) -> RunView:
        lines = [live_line(each) for each in await server.sessions()]
        missing, bands = list[str](), list[Band]()
        folder = find_tokenizer(tokenizer_of(await server.describe(deadline_s=GREETING_S)), tokenizer, missing)
        with say_missing("its pauses", missing):
            bands += map(hold_band, (await server.hold_times(deadline_s=server.deadlines.read_s)).holds)
        return RunView(address.url, lines, tokenizer=folder, bands=bands, missing=missing)

    return ask_server(address, look)


def tokenizer_of(described: ServerDescription) -> TokenizerName:
    """Return the tokenizer of a server. Earlier versions name no folder."""
    return TokenizerName(described.tokenizer or None, described.serves.get("tokenizer_digest"))


def look_into_all(address: SessionServerAddress) -> Callable[[str], SessionView]:
    """Return a reader of sessions that raises `SessionServerError`, and `RunError` for a session that is gone.

    It does not wait again for a server that is gone.
    """
    gone: list[SessionServerError] = []

    def look(session_id: str) -> SessionView:
        if gone:
            raise gone[0]
        try:
            record = ask_server(address, lambda server: server.record(session_id))
        except SessionServerError as error:
            if not error.status:
                gone.append(error)
            raise
        if record.get("phase") == "unknown":
            raise RunError(f"{address.url} no longer has session {session_id}")
        return SessionView.of(record)

    return look

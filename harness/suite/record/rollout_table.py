"""Rollouts of a run, one durable row each, in the run's database.

`kill -9` leaves every row whole. Rollouts run again if interrupted, failed by engine or harness, or replayed on
request; a number's last row counts. Samples are read lazily, so a run may be larger than memory.
"""

import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec

from harness.decoding import convert, read_json
from harness.errors import Cause, StoreError
from harness.machine.disk import disk_failures
from harness.samples.codec import sample_from_json
from harness.samples.rollout import OutcomeKind, describe_judgement, stamp_judgement
from harness.server.store.file_access import only_reading
from harness.sessions.ledger import Ledger
from harness.turn_ends import TurnEnd, TurnStatus
from harness.types import Json, Sample

_BUSY_TIMEOUT_S = 10.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS rollouts (
    number     INTEGER NOT NULL,
    attempt    INTEGER NOT NULL,
    is_final   INTEGER NOT NULL,
    record     TEXT NOT NULL,
    created_at REAL NOT NULL,
    PRIMARY KEY (number, attempt)
)
"""
_BEGUN_SCHEMA = "CREATE TABLE IF NOT EXISTS begun_sessions (session_id TEXT PRIMARY KEY, number INTEGER NOT NULL)"
_BEGIN = "INSERT INTO begun_sessions VALUES (?, ?)"
_BEGUN = """
SELECT session_id FROM begun_sessions JOIN sessions USING (session_id) JOIN turns USING (session_id)
WHERE number = ?1 AND (?2 OR NOT COALESCE(
    (SELECT is_final FROM rollouts WHERE number = ?1 ORDER BY attempt DESC LIMIT 1), 0))
ORDER BY begun_sessions.rowid DESC LIMIT 1
"""
_BEGUN_ATTACHED = """
SELECT session_id FROM attached_sessions
WHERE json_extract(record, '$.metadata.rollout') = ?1 AND json_array_length(record, '$.turns') > 0
AND (?2 OR NOT COALESCE(
    (SELECT is_final FROM rollouts WHERE number = ?1 ORDER BY attempt DESC LIMIT 1), 0))
ORDER BY rowid DESC LIMIT 1
"""
_EARLIER = """
SELECT session_id, json_extract({column}, '$.inherits.session_id') FROM {table}
WHERE json_extract({column}, '$.inherits.trained')
"""
_INSERT = """
INSERT INTO rollouts
SELECT ?1, COALESCE(MAX(attempt) + 1, 0), ?2, ?3, ?4 FROM rollouts WHERE number = ?1
"""

_SUPERSEDED = """
SELECT number, json_extract(record, '$.session_id'), is_final FROM rollouts AS earlier
WHERE EXISTS (SELECT 1 FROM rollouts WHERE number = earlier.number AND attempt > earlier.attempt)
"""
_LAST = "SELECT rowid, record FROM rollouts WHERE number = ? ORDER BY attempt DESC LIMIT 1"
_AMEND = "UPDATE rollouts SET record = ? WHERE rowid = ?"

INTERRUPTED = "interrupted"
"""Drop reason: the session ended with the run, engine or harness, and runs again."""
REPLAYED = "replayed"
"""Drop reason: a final rollout was replayed on request."""

_PASSING_CAUSES = frozenset({Cause.ENGINE, Cause.HARNESS})
"""Causes after which a rollout runs again on resume."""


class RecordedSession(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a session for reports, without tokens."""

    turns: int = 0
    truncated_turns: int = 0
    repeat_terminated_turns: int = 0
    tool_calls: int = 0
    turns_in_flight: int = 0
    """Turns in flight at the reading; the store got their tokens later."""
    ledger: Ledger = Ledger()
    refusals: dict[str, int] | None = None
    """Model calls answered with an error, by code; None in older runs."""
    remarks: tuple[str, ...] = ()

    @classmethod
    def of(cls, session: Json) -> Self:
        """Extract the facts from a server's record."""
        turns = session["turns"]
        return cls(
            turns=len(turns),
            truncated_turns=sum(turn["status"] == TurnStatus.TRUNCATED for turn in turns),
            repeat_terminated_turns=sum(turn["end"] == TurnEnd.REPEAT for turn in turns),
            tool_calls=sum(len(turn["reply"].get("tool_calls") or ()) for turn in turns),
            turns_in_flight=session["turns_in_flight"],
            ledger=convert(session["ledger"], Ledger),
            refusals=session.get("refusals"),
            remarks=tuple(session.get("remarks", ())),
        )


class RolloutRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An ended rollout, for reports and trainers."""

    number: int
    group: int
    scenario: str
    seed: int
    session_id: str | None
    outcome: OutcomeKind
    cause: Cause | None
    detail: str
    agent_result: Json | None
    reward: float | None
    score: Json
    """The check's answer without reward, figures and reason."""
    score_error: str | None
    session: RecordedSession
    samples: Sequence[Json]
    seconds: float
    figures: dict[str, float] = {}
    reason: str = ""
    """The check's words for the reward."""
    met_fault: bool = False
    """True if a fault fired meanwhile, which makes the rollout final."""

    @property
    def is_final(self) -> bool:
        """True if it does not run again on resume."""
        return self.met_fault or (self.outcome is not OutcomeKind.DRAINED and self.cause not in _PASSING_CAUSES)

    @property
    def ledger(self) -> Ledger:
        """The session's ledger; all tokens of a rollout that is not final are dropped."""
        ledger = self.session.ledger
        if self.is_final:
            return ledger
        return Ledger(ledger.generated, dropped={INTERRUPTED: ledger.generated}, unknown=ledger.unknown)

    @property
    def judged(self) -> Json:
        """The check's `figures` and `reason`, without those that it left out."""
        return describe_judgement(self.figures, self.reason)

    def export_samples(self) -> list[Sample]:
        """Return the samples with reward, index, group, and the check's figures and reason as `metadata["score"]`."""
        samples = stamp_judgement(map(sample_from_json, self.samples), self.judged)
        return [replace(each, reward=self.reward, index=self.number, group_index=self.group) for each in samples]


@dataclass(frozen=True, slots=True)
class ExportedSamples(Iterable[Sample]):
    """Samples that a run exports, in order. Loads one rollout at a time."""

    records: Sequence[RolloutRecord]

    def __iter__(self) -> Iterator[Sample]:
        for record in self.records:
            yield from record.export_samples()

    def __len__(self) -> int:
        return sum(len(record.samples) for record in self.records)


class StoredSamples(Sequence[Json]):
    """Samples of one row, read on every access, which raises `StoreError`."""

    def __init__(self, path: Path, rowid: int, count: int) -> None:
        self._path = path
        self._rowid = rowid
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Json]:
        with reading_run(self._path) as connection:
            [record] = connection.execute("SELECT record FROM rollouts WHERE rowid = ?", (self._rowid,)).fetchone()
        yield from read_json(record, _OnlySamples).samples

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # equal to lists, which have none

    def __repr__(self) -> str:
        return repr(list(self))


class _OnlySamples(msgspec.Struct):
    samples: list[Json]


class SupersededAttempt(NamedTuple):
    number: int
    session_id: str | None
    is_final: bool
    """True if it was replayed on request."""


class RolloutLog:
    """Table of rollouts; a context manager. All methods raise `StoreError`, `StoreFull` when the disk is full."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Self:
        with disk_failures(self._path):
            if not self._path.exists():
                self._path.touch(mode=0o600)  # the session store uses this file too, and holds session keys
            self._connection = sqlite3.connect(self._path, timeout=_BUSY_TIMEOUT_S)
            # In WAL mode, NORMAL commits survive `kill -9`, though not a power loss.
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = NORMAL")
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def begin(self, number: int, session_id: str) -> None:
        """Note durably that a rollout begins on a session."""
        with disk_failures(self._path), self._connection:
            self._connection.execute(_SCHEMA)
            self._connection.execute(_BEGUN_SCHEMA)
            self._connection.execute(_BEGIN, (session_id, number))

    def find_record(self, number: int, *, even_final: bool = False) -> str | None:
        """Return the last session with a turn of a rollout that is not final; None if there is none."""
        with disk_failures(self._path):
            if has_table(self._connection, "attached_sessions"):
                self._connection.execute(_SCHEMA)
                query = _BEGUN_ATTACHED
            elif all(has_table(self._connection, name) for name in ("begun_sessions", "turns")):
                query = _BEGUN
            else:
                return None
            row = self._connection.execute(query, (number, even_final)).fetchone()
        return None if row is None else str(row[0])

    def append(self, record: RolloutRecord) -> None:
        """Store the next attempt of the record's number durably."""
        row = (record.number, record.is_final, msgspec.json.encode(record).decode(), time.time())
        with disk_failures(self._path), self._connection:
            self._connection.execute(_SCHEMA)  # not earlier: the session store must find an empty database
            self._connection.execute(_INSERT, row)

    def amend(self, number: int, samples: Sequence[Json]) -> None:
        """Replace the last attempt's samples by the same samples with more logprobs."""
        with disk_failures(self._path), self._connection:
            rowid, row = self._connection.execute(_LAST, (number,)).fetchone()
            record = msgspec.structs.replace(read_json(row, RolloutRecord), samples=samples)
            self._connection.execute(_AMEND, (msgspec.json.encode(record).decode(), rowid))

    def last_attempts(self) -> dict[int, RolloutRecord]:
        with disk_failures(self._path):
            return _last_attempts(self._path, self._connection)


def find_superseded(connection: sqlite3.Connection) -> list[SupersededAttempt]:
    """Return the attempts that later attempts superseded."""
    found = connection.execute(_SUPERSEDED) if has_table(connection, "rollouts") else ()
    return [SupersededAttempt(*row) for row in found]


def find_inherited(connection: sqlite3.Connection, heirs: Iterable[str | None]) -> set[str]:
    """Return the sessions whose records `heirs`, or heirs between, took over."""
    earlier: dict[str | None, str] = {}
    for table, column in (("sessions", "config"), ("attached_sessions", "record")):
        if has_table(connection, table):
            earlier |= dict(connection.execute(_EARLIER.format(table=table, column=column)))
    found: set[str] = set()
    for heir in heirs:
        while (heir := earlier.get(heir)) is not None and heir not in found:
            found.add(heir)
    return found


def read_rollouts(path: Path) -> dict[int, RolloutRecord]:
    """Read each rollout's last record, without writing."""
    with reading_run(path) as connection:
        return _last_attempts(path, connection)


def read_superseded(path: Path) -> set[str | None]:
    """Return the session ids of superseded attempts."""
    with reading_run(path) as connection:
        return {attempt.session_id for attempt in find_superseded(connection)}


def has_table(connection: sqlite3.Connection, name: str) -> bool:
    """Return True if the table exists; runs killed early lack it."""
    return bool(connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (name,)).fetchone())


@contextmanager
def reading_run(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a run's database read-only. Raises `StoreError`."""
    with disk_failures(path), only_reading(path) as connection:
        yield connection


def _last_attempts(path: Path, connection: sqlite3.Connection) -> dict[int, RolloutRecord]:
    if not has_table(connection, "rollouts"):
        return {}
    attempts: dict[int, RolloutRecord] = {}
    try:
        for rowid, number, row in connection.execute(
            "SELECT rowid, number, record FROM rollouts ORDER BY number, attempt"
        ):
            record = read_json(row, RolloutRecord)
            samples = StoredSamples(path, rowid, len(record.samples))
            # The last attempt wins.
            attempts[number] = msgspec.structs.replace(record, samples=samples)
        return attempts
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StoreError(f"{path}: a row of rollouts is damaged: {error}") from error

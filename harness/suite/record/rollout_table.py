"""Rollouts of a run as durable records: one row each, in the run's own database beside the session store's tables.

A row is written when a rollout has ended, in one transaction; `kill -9` at any moment leaves every row whole. A rollout
that did not come to an end of its own (interrupted, or failed by engine or harness) is kept as an attempt and run again
on resume, and one that is asked for again is run again, too; the last row of a `number` is the one that counts. Samples
travel with the row and stay there: a reader of records gets samples that are read when they are looked at, one rollout
at a time, so a run may be larger than memory.
"""

import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self, overload

import msgspec

from harness.errors import Cause, StoreError
from harness.machine.disk import disk_failures
from harness.samples.codec import sample_from_json
from harness.samples.rollout import OutcomeKind
from harness.sessions.ledger import Ledger
from harness.store.only_reading import only_reading
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
_INSERT = """
INSERT INTO rollouts
SELECT ?1, COALESCE(MAX(attempt) + 1, 0), ?2, ?3, ?4 FROM rollouts WHERE number = ?1
"""

_REPLAYED = """
SELECT number, record FROM rollouts AS earlier WHERE is_final
AND EXISTS (SELECT 1 FROM rollouts WHERE number = earlier.number AND attempt > earlier.attempt)
"""
_SUPERSEDED = """
SELECT json_extract(record, '$.session_id') FROM rollouts AS earlier
WHERE EXISTS (SELECT 1 FROM rollouts WHERE number = earlier.number AND attempt > earlier.attempt)
"""
_LAST = "SELECT rowid, record FROM rollouts WHERE number = ? ORDER BY attempt DESC LIMIT 1"
_AMEND = "UPDATE rollouts SET record = ? WHERE rowid = ?"

INTERRUPTED = "interrupted"
"""Drop reason of tokens whose session ended with the run, the engine or the harness, and runs again."""
REPLAYED = "replayed"
"""Drop reason of tokens whose rollout had come to an end of its own and was played again all the same."""

_PASSING_CAUSES = frozenset({Cause.ENGINE, Cause.HARNESS})
"""Neither the model nor the agent is to blame: such a rollout runs again on resume."""


class RecordedSession(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a session for a report; its tokens are in the session store and in the samples."""

    turns: int = 0
    truncated_turns: int = 0
    repeat_terminated_turns: int = 0
    tool_calls: int = 0
    turns_in_flight: int = 0
    """Turns in flight when the session was read; their tokens came to the store afterwards."""
    ledger: Ledger = Ledger()
    refusals: dict[str, int] | None = None
    """Model calls that were answered with an error, by its code; None in runs of earlier versions."""
    remarks: tuple[str, ...] = ()
    """What its owner should know of its samples."""

    @classmethod
    def of(cls, session: Json) -> Self:
        """The facts of a session as the server records it."""
        turns = session["turns"]
        return cls(
            turns=len(turns),
            truncated_turns=sum(turn["status"] == TurnStatus.TRUNCATED for turn in turns),
            repeat_terminated_turns=sum(turn["end"] == TurnEnd.REPEAT for turn in turns),
            tool_calls=sum(len(turn["reply"].get("tool_calls") or ()) for turn in turns),
            turns_in_flight=session["turns_in_flight"],
            ledger=msgspec.convert(session["ledger"], Ledger),
            refusals=session.get("refusals"),
            remarks=tuple(session.get("remarks", ())),
        )


class RolloutRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout that has ended, with everything that a report or a trainer needs of it."""

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
    """The rest of the check's answer, without the reward."""
    score_error: str | None
    session: RecordedSession
    samples: Sequence[Json]
    seconds: float
    met_fault: bool = False
    """A fault of its scenario came while it ran: however it ended, that is what the scenario wanted to see."""

    @property
    def is_final(self) -> bool:
        """The rollout came to an end of its own and is not run again."""
        return self.met_fault or (self.outcome is not OutcomeKind.DRAINED and self.cause not in _PASSING_CAUSES)

    @property
    def ledger(self) -> Ledger:
        """Where the session's tokens went; those of a rollout that is not final are in no sample."""
        ledger = self.session.ledger
        if self.is_final:
            return ledger
        return Ledger(ledger.generated, dropped={INTERRUPTED: ledger.generated}, unknown=ledger.unknown)

    def export_samples(self) -> list[Sample]:
        """Its samples, with what only the run knows: reward, index and group."""
        return [
            replace(sample_from_json(sample), reward=self.reward, index=self.number, group_index=self.group)
            for sample in self.samples
        ]


@dataclass(frozen=True, slots=True)
class ExportedSamples(Iterable[Sample]):
    """The samples that a run exports, in order, those of one rollout in memory at a time."""

    records: Sequence[RolloutRecord]

    def __iter__(self) -> Iterator[Sample]:
        for record in self.records:
            yield from record.export_samples()

    def __len__(self) -> int:
        return sum(len(record.samples) for record in self.records)


class StoredSamples(Sequence[Json]):
    """The samples of one row, read anew whenever they are looked at. Raises `StoreError` then."""

    def __init__(self, path: Path, rowid: int, count: int) -> None:
        self._path = path
        self._rowid = rowid
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Json]:
        with reading_run(self._path) as connection:
            [record] = connection.execute("SELECT record FROM rollouts WHERE rowid = ?", (self._rowid,)).fetchone()
        yield from msgspec.json.decode(record, type=_OnlySamples).samples

    @overload
    def __getitem__(self, index: int) -> Json: ...

    @overload
    def __getitem__(self, index: slice) -> list[Json]: ...

    def __getitem__(self, index: int | slice) -> Json | list[Json]:
        return list(self)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # equal to lists, which have none

    def __repr__(self) -> str:
        return repr(list(self))


class _OnlySamples(msgspec.Struct):
    samples: list[Json]


class _OnlySession(msgspec.Struct):
    session_id: str | None


class ReplayedAttempt(NamedTuple):
    """A rollout that had come to an end of its own, and was played again because somebody asked for it."""

    number: int
    session_id: str | None


class RolloutLog:
    """The table of rollouts; a context manager. All methods raise `StoreError`, `StoreFull` when the disk is full."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Self:
        with disk_failures(self._path):
            if not self._path.exists():
                self._path.touch(mode=0o600)  # it will be the session store too, and has the keys of sessions then
            self._connection = sqlite3.connect(self._path, timeout=_BUSY_TIMEOUT_S)
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = NORMAL")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._connection.close()

    def append(self, record: RolloutRecord) -> None:
        """Make `record` durable, as the next attempt of its number."""
        row = (record.number, record.is_final, msgspec.json.encode(record).decode(), time.time())
        with disk_failures(self._path), self._connection:
            self._connection.execute(_SCHEMA)  # not earlier: the session store begins with an empty database
            self._connection.execute(_INSERT, row)

    def amend(self, number: int, samples: Sequence[Json]) -> None:
        """Give the last attempt of rollout `number` these samples: its own, with more known about their tokens."""
        with disk_failures(self._path), self._connection:
            rowid, row = self._connection.execute(_LAST, (number,)).fetchone()
            record = msgspec.structs.replace(msgspec.json.decode(row, type=RolloutRecord), samples=samples)
            self._connection.execute(_AMEND, (msgspec.json.encode(record).decode(), rowid))

    def last_attempts(self) -> dict[int, RolloutRecord]:
        """The record that counts of every rollout that has one, by number, in order."""
        with disk_failures(self._path):
            return _last_attempts(self._path, self._connection)


def find_replayed(connection: sqlite3.Connection) -> list[ReplayedAttempt]:
    """The attempts in a run's database that later ones have taken the place of, though nothing had cut them short."""
    if not has_table(connection, "rollouts"):
        return []
    return [
        ReplayedAttempt(number, msgspec.json.decode(row, type=_OnlySession).session_id)
        for number, row in connection.execute(_REPLAYED)
    ]


def read_rollouts(path: Path) -> dict[int, RolloutRecord]:
    """The rollouts in the database `path`, for tools that look at a run; nothing is written."""
    with reading_run(path) as connection:
        return _last_attempts(path, connection)


def read_superseded(path: Path) -> set[str | None]:
    """The sessions of attempts that later ones have taken the place of."""
    with reading_run(path) as connection:
        found = connection.execute(_SUPERSEDED) if has_table(connection, "rollouts") else ()
        return {session_id for (session_id,) in found}


def has_table(connection: sqlite3.Connection, name: str) -> bool:
    """There is a table `name`; a run that was killed early has none."""
    return bool(connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (name,)).fetchone())


@contextmanager
def reading_run(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection to the database of a run, `path`, that cannot write. Raises `StoreError`."""
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
            record = msgspec.json.decode(row, type=RolloutRecord)
            samples = StoredSamples(path, rowid, len(record.samples))
            attempts[number] = msgspec.structs.replace(record, samples=samples)
        return attempts
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StoreError(f"{path}: a row of rollouts is damaged: {error}") from error

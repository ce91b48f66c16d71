"""Tables of a session store by version, and their migrations.

A new store starts at the first version and is then migrated, so there is one path to the current tables. To change
them, append a step to `STEPS`; never edit a released step. The `claim` prevents concurrent migrations. One transaction
makes all steps that a store lacks: one that fails leaves it unchanged.

Read-only tools read older stores without migrating them (`read_as_today`), so the additions of a step must be readable
without it.
"""

import sqlite3
from pathlib import Path

from harness.errors import StoreError

FIRST_VERSION = 2

_FIRST_TABLES = """
CREATE TABLE sessions (
    session_id TEXT PRIMARY KEY,
    api_key    TEXT NOT NULL,
    phase      TEXT NOT NULL,
    config     TEXT NOT NULL,
    created_at REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE turns (
    session_id     TEXT NOT NULL REFERENCES sessions,
    turn           INTEGER NOT NULL,
    parent         INTEGER,
    status         TEXT NOT NULL,
    finish_reason  TEXT NOT NULL,
    context_ids    BLOB NOT NULL,
    prompt_length  INTEGER NOT NULL,
    prompt_digest  TEXT NOT NULL,
    output_ids     BLOB NOT NULL,
    logprobs       BLOB NOT NULL,
    version_spans  TEXT NOT NULL,
    segments       TEXT NOT NULL,
    messages_delta TEXT NOT NULL,
    reply          TEXT NOT NULL,
    sampling       TEXT NOT NULL,
    chain_key      BLOB NOT NULL,
    ordinal        INTEGER NOT NULL,
    request_digest TEXT NOT NULL,
    created_at     REAL NOT NULL,
    seconds        REAL NOT NULL,
    delivered      INTEGER NOT NULL,
    notes          TEXT NOT NULL,
    forced_tokens  INTEGER NOT NULL,
    discarded      TEXT NOT NULL,
    proximal_logprobs BLOB,
    proximal_versions BLOB,
    PRIMARY KEY (session_id, turn)
) WITHOUT ROWID;
"""

_CLOSING_TIMES = """
ALTER TABLE sessions ADD COLUMN closed_at REAL;
UPDATE sessions SET closed_at = strftime('%s', 'now') + 0.0 WHERE phase = 'closed';
CREATE INDEX unclosed_sessions ON sessions (created_at, session_id) WHERE phase != 'closed';
CREATE INDEX closed_sessions ON sessions (closed_at) WHERE phase = 'closed';
"""

_HOLDS = """
CREATE TABLE holds (
    holder  TEXT PRIMARY KEY,
    kind    TEXT NOT NULL,
    until   REAL NOT NULL,
    engines INTEGER NOT NULL
) WITHOUT ROWID;
"""

_CLOSE_REASONS = "ALTER TABLE sessions ADD COLUMN closed_because TEXT;"

_WEIGHT_LABELS = """
CREATE TABLE weight_labels (
    label  TEXT PRIMARY KEY,
    number INTEGER NOT NULL
) WITHOUT ROWID;
"""

# Old rows stay, and `rows.SELECT_TURNS` translates them on read. Rewriting them would take the disk space and the
# minutes of a full copy, and one damaged page would keep the store from opening.
_TURN_ENDS = "ALTER TABLE turns RENAME COLUMN finish_reason TO turn_end;"
_UNKNOWN_OUTPUT = "ALTER TABLE turns ADD COLUMN unknown TEXT NOT NULL DEFAULT '[]';"
_WORK_OF_HOLDS = "ALTER TABLE holds ADD COLUMN work TEXT NOT NULL DEFAULT '';"

# Triggers write these rows, so that a reader of a run can find the hold that delayed its turns. Storing a hold again
# renews it; `until` 0 ends it. The last 100,000 rows stay.
_HOLD_TIMES = """
CREATE TABLE hold_times (
    holder   TEXT NOT NULL,
    kind     TEXT NOT NULL,
    engines  INTEGER NOT NULL,
    began_at REAL NOT NULL,
    ended_at REAL
);
CREATE INDEX running_holds ON hold_times (holder) WHERE ended_at IS NULL;
CREATE TRIGGER note_kept_hold AFTER INSERT ON holds BEGIN
    UPDATE hold_times SET ended_at = (julianday('now') - 2440587.5) * 86400.0
    WHERE holder = NEW.holder AND ended_at IS NULL
    AND (NEW.until <= 0 OR kind != NEW.kind OR engines != NEW.engines);
    INSERT INTO hold_times
    SELECT NEW.holder, NEW.kind, NEW.engines, (julianday('now') - 2440587.5) * 86400.0, NULL
    WHERE NEW.until > 0
    AND NOT EXISTS (SELECT 1 FROM hold_times WHERE holder = NEW.holder AND ended_at IS NULL);
    DELETE FROM hold_times WHERE rowid <= (SELECT MAX(rowid) FROM hold_times) - 100000;
END;
CREATE TRIGGER note_dropped_hold AFTER DELETE ON holds BEGIN
    UPDATE hold_times SET ended_at = (julianday('now') - 2440587.5) * 86400.0
    WHERE holder = OLD.holder AND ended_at IS NULL;
END;
"""

# Before this version, a key covered a whole message. Recorded turns have keys of exact matching, so their sessions keep
# to it. Closed sessions take no more turns.
_EXACT_KEYS = """
UPDATE sessions SET config = json_insert(json_insert(config, '$.matching', json('[]')), '$.matching[#]', 'exact')
WHERE phase != 'closed' AND json_valid(config);
"""

_SESSION_ENDS = """
ALTER TABLE sessions ADD COLUMN tokenizer TEXT;
ALTER TABLE sessions ADD COLUMN tokenizer_digest TEXT;
ALTER TABLE sessions ADD COLUMN outcome TEXT;
ALTER TABLE sessions ADD COLUMN reason TEXT;
ALTER TABLE sessions ADD COLUMN reward REAL;
"""

# Apart from the turns: a turn is rewritten when it is delivered or scored, and its rows are large.
_TURN_ROWS = """
CREATE TABLE turn_rows (
    session_id TEXT NOT NULL,
    turn       INTEGER NOT NULL,
    rows       BLOB NOT NULL,
    PRIMARY KEY (session_id, turn)
);
"""

_TEACHER_SCORES = """
CREATE TABLE teacher_scores (
    session_id TEXT NOT NULL,
    turn       INTEGER NOT NULL,
    teacher    TEXT NOT NULL,
    version    TEXT NOT NULL,
    logprobs   BLOB NOT NULL,
    PRIMARY KEY (session_id, turn, teacher)
);
"""

_TEACHER_TOPS = """
ALTER TABLE teacher_scores ADD COLUMN top BLOB;
"""

STEPS: tuple[str, ...] = (
    _CLOSING_TIMES,
    _HOLDS,
    _CLOSE_REASONS,
    _WEIGHT_LABELS,
    _TURN_ENDS,
    _UNKNOWN_OUTPUT,
    _WORK_OF_HOLDS,
    _HOLD_TIMES,
    _EXACT_KEYS,
    _SESSION_ENDS,
    _TURN_ROWS,
    _TEACHER_SCORES,
    _TEACHER_TOPS,
)
"""Migrations: the first makes version `FIRST_VERSION + 1` from `FIRST_VERSION`, and so on."""

SCHEMA_VERSION = FIRST_VERSION + len(STEPS)


def bring_up_to_date(path: Path, connection: sqlite3.Connection) -> None:
    """Create the tables of the store at `path`, or migrate them, at once. Raises `StoreError`, `sqlite3.Error`."""
    is_new = not connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    steps = (_FIRST_TABLES, *STEPS) if is_new else STEPS[readable_version(path, connection) - FIRST_VERSION :]
    if steps:
        version = f"PRAGMA user_version = {SCHEMA_VERSION};"
        connection.executescript(f"BEGIN IMMEDIATE; {''.join(steps)} {version} COMMIT;")


def read_as_today(path: Path, connection: sqlite3.Connection) -> None:
    """Make an older store look current to a read-only `connection`. Raises `StoreError`, `sqlite3.Error`."""
    steps_made = readable_version(path, connection) - FIRST_VERSION
    ends = ", ".join(f"NULL AS {name}" for name in ("tokenizer", "tokenizer_digest", "outcome", "reason", "reward"))
    made_later = {
        "sessions": {_CLOSE_REASONS: "NULL AS closed_because", _SESSION_ENDS: ends},
        "teacher_scores": {_TEACHER_TOPS: "NULL AS top"},
        "turns": {_TURN_ENDS: "finish_reason AS turn_end", _UNKNOWN_OUTPUT: "'[]' AS unknown"},
    }
    for table, steps in made_later.items():
        columns = [column for step, column in steps.items() if STEPS.index(step) >= steps_made]
        if columns:
            # The statement contains only words of the table above.
            connection.execute(f"CREATE TEMP VIEW {table} AS SELECT *, {', '.join(columns)} FROM main.{table}")  # noqa: S608


def readable_version(path: Path, connection: sqlite3.Connection) -> int:
    """Return the version of the store at `path`. Raises `StoreError` if it is none, or unsupported."""
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'sessions'").fetchone():
        raise StoreError(f"{path} is a database, but not a session store; use a new file")
    found: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if found > SCHEMA_VERSION:
        raise StoreError(
            f"{path} has store version {found}, written by a newer harness; this one reads up to {SCHEMA_VERSION}: use"
            " that harness, or a new file"
        )
    if found < FIRST_VERSION:
        raise StoreError(f"{path} has store version {found}, this harness reads {FIRST_VERSION} and up; use a new file")
    return found

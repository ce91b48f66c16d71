"""Conversion of sessions and turns to database rows and back.

Token columns are little-endian blobs (int32 ids, float32 logprobs); structured columns are JSON. A turn stores only the
prompt ids that its parent lacks, so the size of a row depends on that turn alone (I11).
"""

import sqlite3
from typing import Any, NamedTuple

import msgspec
import numpy as np

from harness.decoding import read_json
from harness.sessions.gate import Hold, HoldKind
from harness.sessions.hold_times import HoldTime
from harness.sessions.lifecycle import CloseReason, Phase, RolloutEnd
from harness.sessions.paging import SessionStub, TurnOutline
from harness.sessions.session import Session
from harness.sessions.session_config import Inheritance, SessionConfig
from harness.top_logprobs import TopLogprobs
from harness.turn_ends import TurnEnd, TurnStatus
from harness.types import (
    Discarded,
    Json,
    Logprobs,
    TeacherScores,
    TokenIds,
    Turn,
    TurnNotes,
    TurnSegment,
    UnknownOutput,
    VersionSpan,
)

KEEP_HOLD = "INSERT OR REPLACE INTO holds (holder, kind, until, engines, work) VALUES (?, ?, ?, ?, ?)"
DROP_HOLD = "DELETE FROM holds WHERE holder = ?"
SELECT_HOLDS = "SELECT * FROM holds ORDER BY holder"
SELECT_HOLD_TIMES = "SELECT holder, kind, engines, began_at, ended_at FROM hold_times ORDER BY began_at, rowid"
SELECT_LAST_HOLD_TIMES = (
    "SELECT * FROM (SELECT rowid AS place, * FROM hold_times ORDER BY rowid DESC LIMIT ?) ORDER BY began_at, place"
)
KEEP_LABEL = "INSERT OR REPLACE INTO weight_labels (label, number) VALUES (?, ?)"
SELECT_LABELS = "SELECT label, number FROM weight_labels"
INSERT_SESSION = (
    "INSERT INTO sessions (session_id, api_key, phase, config, created_at, tokenizer, tokenizer_digest)"
    " VALUES (?, ?, ?, ?, ?, ?, ?)"
)
INSERT_TURN = (
    "INSERT OR REPLACE INTO turns"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
INSERT_ROWS = "INSERT OR REPLACE INTO turn_rows (session_id, turn, rows) VALUES (?, ?, ?)"
COPY_ROWS = (
    "INSERT OR REPLACE INTO turn_rows (session_id, turn, rows) SELECT ?1, turn, rows FROM turn_rows"
    " WHERE session_id = ?2 AND turn IN (SELECT turn FROM turns WHERE session_id = ?1)"
)
MOVE_ROWS = "UPDATE turn_rows SET session_id = ? WHERE session_id = ? AND turn = ?"
# Matched by length, as scores below.
INSERT_TEACHER_SCORES = (
    "INSERT OR REPLACE INTO teacher_scores SELECT session_id, turn, ?, ?, ?, ? FROM turns"
    " WHERE session_id = ? AND turn = ? AND length(output_ids) = ?"
)
MOVE_TEACHER_SCORES = (
    "UPDATE OR REPLACE teacher_scores SET session_id = ? WHERE session_id = ?"
    " AND turn IN (SELECT turn FROM turns WHERE session_id = ? AND status != 'aborted')"
)
SELECT_TEACHER_SCORES = "SELECT turn, teacher, version, logprobs, top FROM teacher_scores WHERE session_id = ?"
SELECT_ROWS = "SELECT turn, rows FROM turn_rows WHERE session_id = ?"
SELECT_ROWS_OF_ABORTED = (
    "SELECT turn, rows FROM turn_rows JOIN turns USING (session_id, turn) WHERE session_id = ? AND status = 'aborted'"
)
UPDATE_PHASE = "UPDATE sessions SET phase = ?, closed_at = ?, closed_because = ? WHERE session_id = ?"
UPDATE_END = "UPDATE sessions SET outcome = ?, reason = ?, reward = ? WHERE session_id = ?"
MOVE_TURN = "UPDATE turns SET session_id = ?, turn_end = ?, delivered = ? WHERE session_id = ? AND turn = ?"
SELECT_CLOSED_BEFORE = (
    "SELECT session_id FROM sessions WHERE phase = 'closed' AND closed_at < ? ORDER BY closed_at LIMIT ?"
)
DELETE_SESSION = tuple(
    f"DELETE FROM {table} WHERE session_id = ?"  # noqa: S608  # ours
    for table in ("turn_rows", "teacher_scores", "turns", "sessions")
)
# Matched by length, so that columns of one outcome never join the ids of another.
UPDATE_SCORES = (
    "UPDATE turns SET proximal_logprobs = ?, proximal_versions = ?"
    " WHERE session_id = ? AND turn = ? AND length(output_ids) = ?"
)
UPDATE_DELIVERED = "UPDATE turns SET delivered = ? WHERE session_id = ? AND turn = ?"
SELECT_SESSIONS = "SELECT * FROM sessions ORDER BY created_at, session_id"
SELECT_UNCLOSED_SESSIONS = "SELECT * FROM sessions WHERE phase != 'closed' ORDER BY created_at, session_id"
OWN_TURN = "json_extract(iif(json_valid(notes), notes, '{}'), '$.inherited') IS NULL"
"""True for turns that an engine generated for their session."""
SAMPLED = f"""COALESCE(SUM(length(output_ids) / 4 + (
    SELECT COALESCE(SUM(json_extract(value, '$.tokens')), 0) FROM json_each(discarded)
)) FILTER (WHERE {OWN_TURN}), 0)"""  # noqa: S608  # ours
"""Sum of sampled tokens, discarded ones included."""
LIST_SESSIONS = (
    f"SELECT sessions.*, {SAMPLED} AS tokens"  # noqa: S608  # ours
    " FROM sessions LEFT JOIN turns USING (session_id) GROUP BY sessions.session_id"
)
COUNT_UNKNOWN = f"""
SELECT session_id, COUNT(*) AS requests, SUM(json_extract(value, '$.at_most')) AS tokens
FROM turns, json_each(turns.unknown) WHERE {OWN_TURN} GROUP BY session_id
"""  # noqa: S608  # ours
SELECT_HEIR = (
    "SELECT session_id FROM sessions WHERE json_extract(config, '$.inherits.session_id') = ?"
    " AND json_extract(config, '$.inherits.trained') LIMIT 1"
)
SELECT_SESSION = "SELECT * FROM sessions WHERE session_id = ?"
# Before store version 7 this column held a finish reason. Its words differ from those of ends, except where both mean
# the same. It says less than an end: the noted error and the phase of the session supply the rest. An aborted turn of a
# closed session counts as ended by the engine, because the engine handed it over, no matter which side requested the
# abort. Invalid JSON in the notes is damage, and is reported when the session is read.
_TOLD_END = """CASE
    WHEN turn_end = 'stop' THEN 'model'
    WHEN turn_end = 'repeat_terminated' THEN 'repeat'
    WHEN turn_end = 'abort' THEN iif(
        (SELECT phase FROM sessions WHERE sessions.session_id = turns.session_id) = 'closing',
        'drained', 'engine_aborted')
    WHEN turn_end IN ('disconnect', 'error') THEN
        CASE json_extract(iif(json_valid(notes), notes, '{}'), '$.error.code')
            WHEN 'session_closed' THEN 'session_ended'
            WHEN 'gate_closed' THEN 'gate_timeout'
            WHEN 'server_stopping' THEN 'server_stopped'
            WHEN 'limit_reached' THEN 'stale'
            ELSE CASE json_extract(iif(json_valid(notes), notes, '{}'), '$.error.cause')
                WHEN 'engine' THEN 'engine_failed'
                WHEN 'harness' THEN 'server_failed'
                ELSE iif(turn_end = 'error', 'server_failed', 'client_left') END END
    ELSE turn_end END"""
SELECT_TURNS = f"SELECT *, {_TOLD_END} AS told_end FROM turns WHERE session_id = ? ORDER BY turn"  # noqa: S608  # ours
SELECT_PHASE = "SELECT phase FROM sessions WHERE session_id = ?"
SELECT_OUTLINES = (
    f"SELECT turn, parent, status, {_TOLD_END} AS told_end, prompt_digest, length(output_ids) AS output_bytes,"  # noqa: S608  # ours
    " delivered, discarded, unknown, proximal_versions FROM turns WHERE session_id = ? ORDER BY turn"
)


class TokenizerName(NamedTuple):
    name: str | None = None
    """Its folder."""
    digest: str | None = None


class StoredLine(NamedTuple):
    session_id: str
    state: str
    """Close reason, or the phase if not closed."""
    sampled: int
    """Sampled tokens, discarded ones included."""
    end: RolloutEnd | None
    tokenizer: TokenizerName
    inherits: Inheritance | None = None


class _OnlyInherits(msgspec.Struct):
    inherits: Inheritance | None = None


Row = tuple[Any, ...]
Statement = tuple[str, Row]


def hold_from_row(row: sqlite3.Row) -> Hold:
    """Decode a row of `SELECT_HOLDS`."""
    return Hold(row["holder"], HoldKind(row["kind"]), float(row["until"]), bool(row["engines"]), str(row["work"]))


def hold_time_from_row(row: sqlite3.Row) -> HoldTime:
    """Decode a row of `SELECT_HOLD_TIMES`."""
    ended_at = None if row["ended_at"] is None else float(row["ended_at"])
    return HoldTime(row["holder"], HoldKind(row["kind"]), bool(row["engines"]), float(row["began_at"]), ended_at)


def session_row(session: Session, tokenizer: TokenizerName) -> Row:
    """Return the parameters of `INSERT_SESSION`."""
    config = _text(session.config)
    return session.session_id, session.api_key, str(session.phase), config, session.created_at, *tokenizer


def line_from_row(row: sqlite3.Row) -> StoredLine:
    """Decode a row of `LIST_SESSIONS`."""
    state = row["closed_because"] or row["phase"]
    end = None if row["outcome"] is None else RolloutEnd(row["outcome"], row["reason"] or "", row["reward"])
    tokenizer = TokenizerName(row["tokenizer"], row["tokenizer_digest"])
    inherits = read_json(row["config"], _OnlyInherits).inherits
    return StoredLine(row["session_id"], state, row["tokens"], end, tokenizer, inherits)


def phase_row(session: Session | SessionStub, now: float) -> Row:
    """Return the parameters of `UPDATE_PHASE`."""
    closed_at = now if session.phase is Phase.CLOSED else None
    return str(session.phase), closed_at, session.closed_because, session.session_id


def turn_row(session_id: str, turn: Turn) -> Row:
    """Return the parameters of `INSERT_TURN`."""
    return (
        session_id,
        turn.index,
        turn.parent,
        str(turn.status),
        str(turn.end),
        _blob(turn.context_ids),
        turn.prompt_length,
        turn.prompt_digest,
        _blob(turn.output_ids),
        _blob(turn.logprobs),
        _text(turn.version_spans),
        _text(turn.segments),
        _text(turn.messages_delta),
        _text(turn.reply),
        _text(turn.sampling),
        turn.key,
        turn.ordinal,
        turn.request_digest,
        turn.created_at,
        turn.seconds,
        int(turn.delivered),
        _text(turn.notes.to_json()),
        turn.forced_tokens,
        _text(turn.discarded),
        *_scores(turn),
        _text(turn.unknown),
    )


def scores_row(session_id: str, turn: Turn) -> Row:
    """Return the parameters of `UPDATE_SCORES`."""
    return *_scores(turn), session_id, turn.index, turn.output_ids.nbytes


def teacher_scores_row(session_id: str, turn: Turn, name: str) -> Row:
    """Return the parameters of `INSERT_TEACHER_SCORES`."""
    scores = turn.teachers[name]
    top = None if scores.top is None else msgspec.msgpack.encode(scores.top.to_plain())
    return name, scores.version, _blob(scores.logprobs), top, session_id, turn.index, turn.output_ids.nbytes


def teacher_scores_from_row(row: sqlite3.Row) -> TeacherScores:
    """Decode a row of `SELECT_TEACHER_SCORES`."""
    top = None if row["top"] is None else TopLogprobs.from_plain(**msgspec.msgpack.decode(row["top"]))
    return TeacherScores(row["version"], _logprobs(row["logprobs"]), top)


def session_from_row(row: sqlite3.Row) -> Session:
    """Decode a row of `SELECT_SESSIONS`, without turns."""
    config = read_json(row["config"], SessionConfig)
    session = Session(row["session_id"], row["api_key"], config, row["created_at"])
    session.phase = Phase(row["phase"])
    session.closed_because = None if row["closed_because"] is None else CloseReason(row["closed_because"])
    return session


def turn_from_row(row: sqlite3.Row) -> Turn:
    """Decode a row of `SELECT_TURNS`. Raises `ValueError` if its columns contradict each other."""
    turn = Turn(
        index=row["turn"],
        parent=row["parent"],
        status=TurnStatus(row["status"]),
        end=TurnEnd(row["told_end"]),
        context_ids=_ids(row["context_ids"]),
        prompt_length=row["prompt_length"],
        prompt_digest=row["prompt_digest"],
        output_ids=_ids(row["output_ids"]),
        logprobs=_logprobs(row["logprobs"]),
        version_spans=read_json(row["version_spans"], tuple[VersionSpan, ...]),
        segments=read_json(row["segments"], tuple[TurnSegment, ...]),
        messages_delta=read_json(row["messages_delta"], tuple[Json, ...]),
        reply=read_json(row["reply"], Json),
        sampling=msgspec.json.decode(row["sampling"]),
        key=row["chain_key"],
        ordinal=row["ordinal"],
        request_digest=row["request_digest"],
        created_at=row["created_at"],
        seconds=row["seconds"],
        delivered=bool(row["delivered"]),
        notes=TurnNotes.from_json(read_json(row["notes"], Json)),
        forced_tokens=row["forced_tokens"],
        discarded=read_json(row["discarded"], tuple[Discarded, ...]),
        unknown=read_json(row["unknown"], tuple[UnknownOutput, ...]),
        proximal_logprobs=None if row["proximal_logprobs"] is None else _logprobs(row["proximal_logprobs"]),
        proximal_versions=None if row["proximal_versions"] is None else _ids(row["proximal_versions"]),
    )
    columns = (turn.logprobs, turn.proximal_logprobs, turn.proximal_versions)
    sizes = [column.size for column in columns if column is not None]
    if any(size != turn.output_ids.size for size in sizes):
        raise ValueError(f"turn {turn.index} has {turn.output_ids.size} output ids and columns of {sizes}")
    return turn


def outline_from_row(row: sqlite3.Row) -> TurnOutline:
    """Decode a row of `SELECT_OUTLINES`."""
    return TurnOutline(
        row["turn"],
        row["parent"],
        row["status"],
        row["told_end"],
        row["prompt_digest"],
        row["output_bytes"],
        bool(row["delivered"]),
        read_json(row["discarded"], tuple[Discarded, ...]),
        read_json(row["unknown"], tuple[UnknownOutput, ...]),
        row["proximal_versions"],
    )


def _scores(turn: Turn) -> Row:
    columns = (turn.proximal_logprobs, turn.proximal_versions)
    return tuple(None if column is None else _blob(column) for column in columns)


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _blob(column: TokenIds | Logprobs) -> bytes:
    return column.astype(column.dtype.newbyteorder("<"), copy=False).tobytes()


def _ids(blob: bytes) -> TokenIds:
    return np.frombuffer(blob, dtype="<i4").astype(np.int32, copy=False)


def _logprobs(blob: bytes) -> Logprobs:
    return np.frombuffer(blob, dtype="<f4").astype(np.float32, copy=False)

"""Reads a session store with nothing but sqlite3 and the file's own columns, to check what our code wrote.

It imports nothing of the harness: prompts are put together from parents, digests are recomputed, the ledger is counted
by the merge rule as the design states it.
"""

import json
import sqlite3
from array import array
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

WAITING = {"client_left", "session_ended", "gate_timeout", "engine_failed", "server_stopped", "server_failed"}
"""Ends of turns whose partial output is in no sample until somebody continues with it."""
TRAINED = ("main", "compaction", "subagent")
NONE_UNKNOWN = {"requests": 0, "tokens": 0}
"""Of a ledger whose engines handed over everything."""


@dataclass
class StoredTurn:
    """A row of `turns` with its whole prompt."""

    index: int
    parent: int | None
    status: str
    prompt: list[int]
    output: list[int]
    logprobs: list[float]
    reply: dict[str, Any]
    delivered: bool
    seed: int | None
    end: str
    request_digest: str
    segments: list[dict[str, Any]]
    discarded: list[dict[str, Any]]
    forced: int
    unknown: list[dict[str, Any]]
    prompt_digest: str

    @property
    def is_usable(self) -> bool:
        return self.status != "failed" and self.end not in WAITING

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


@dataclass
class StoredSession:
    """A row of `sessions` and its turns by index."""

    phase: str
    config: dict[str, Any]
    turns: dict[int, StoredTurn] = field(default_factory=dict)


def read_file(path: Path) -> dict[str, StoredSession]:
    """Sessions by id. Fails when a parent is missing or a prompt is not what its digest says."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        ids = [row[0] for row in connection.execute("SELECT session_id FROM sessions")]
    return read_sessions(path, ids)


def read_sessions(path: Path, session_ids: Iterable[str]) -> dict[str, StoredSession]:
    """As `read_file`, of a few sessions among many; those that the file lacks are missing."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        connection.row_factory = sqlite3.Row
        among = "session_id IN (SELECT value FROM json_each(?))"
        wanted = (json.dumps(list(session_ids)),)
        sessions = {
            row["session_id"]: StoredSession(row["phase"], json.loads(row["config"]))
            for row in connection.execute(f"SELECT * FROM sessions WHERE {among}", wanted)
        }
        for row in connection.execute(f"SELECT * FROM turns WHERE {among} ORDER BY session_id, turn", wanted):
            turns = sessions[row["session_id"]].turns
            turns[row["turn"]] = read_turn(row, turns)
    return sessions


def read_turn(row: sqlite3.Row, turns: dict[int, StoredTurn]) -> StoredTurn:
    """One row; its parent has to be among `turns`."""
    before = [] if row["parent"] is None else turns[row["parent"]].tokens
    prompt = before + numbers("i", row["context_ids"])
    assert len(prompt) == row["prompt_length"]
    assert blake2b(array("i", prompt).tobytes(), digest_size=16).hexdigest() == row["prompt_digest"]
    output, logprobs = numbers("i", row["output_ids"]), numbers("f", row["logprobs"])
    assert len(output) == len(logprobs) == sum(span["end"] - span["start"] for span in json.loads(row["version_spans"]))
    return StoredTurn(
        row["turn"],
        row["parent"],
        row["status"],
        prompt,
        output,
        logprobs,
        json.loads(row["reply"]),
        bool(row["delivered"]),
        json.loads(row["sampling"])["used"]["seed"],
        row["turn_end"],
        row["request_digest"],
        json.loads(row["segments"]),
        json.loads(row["discarded"]),
        len(output) if "script_step" in json.loads(row["notes"]) else row["forced_tokens"],
        json.loads(row["unknown"]),
        row["prompt_digest"],
    )


def numbers(kind: str, blob: bytes) -> list[Any]:
    """A column of 32-bit values."""
    values = array(kind)
    values.frombytes(blob)
    return values.tolist()


def ledger_of(session: StoredSession, record: dict[str, Any] | None = None) -> dict[str, Any]:
    """The ledger of a session, counted from the rows (I3, I4); only the roles of its calls are those of `record`.

    Without a record all calls are of the main line, but for answers that the agent left for another one to the same
    prompt.
    """
    live = {index: turn for index, turn in session.turns.items() if turn.is_usable and turn.output}
    roles = _plain_roles(live) if record is None else {turn["turn"]: turn["role"] for turn in record["turns"]}
    trailing: set[int] = set()
    kept: set[int] = set()
    for index, turn in session.turns.items():
        before = None if turn.parent is None else session.turns[turn.parent]
        if before is not None and (before.status != "completed" or before.index in trailing):
            trailing.add(index)
        path = turn if index in live and roles.get(index) in TRAINED else None
        while path is not None:
            kept.add(path.index)
            path = None if path.parent is None else session.turns[path.parent]
    kept -= trailing
    ledger: dict[str, Any] = {"generated": 0, "trained": 0, "masked": 0, "dropped": {}, "unknown": dict(NONE_UNKNOWN)}
    for index, turn in session.turns.items():
        ledger["generated"] += len(turn.output) + sum(each["tokens"] for each in turn.discarded)
        if index in kept:
            trained = len(turn.output) - turn.forced if roles.get(index) in TRAINED else 0
            ledger["trained"] += trained
            ledger["masked"] += len(turn.output) - trained
        elif turn.output:
            is_trained = roles.get(index) in TRAINED
            reason = "after_incomplete" if is_trained else roles.get(index, "")
            reason = "failed_turn" if turn.status == "failed" else "undelivered" if turn.end in WAITING else reason
            drop(ledger, reason, len(turn.output))
        for each in turn.discarded:
            drop(ledger, each["reason"], each["tokens"])
        ledger["unknown"]["requests"] += len(turn.unknown)
        ledger["unknown"]["tokens"] += sum(each["at_most"] for each in turn.unknown)
    return ledger


def _plain_roles(live: dict[int, StoredTurn]) -> dict[int, str]:
    extended = {turn.parent for turn in live.values()}
    roles = dict.fromkeys(live, "main")
    for index, turn in live.items():
        alike = [each for each in live.values() if each.prompt_digest == turn.prompt_digest]
        taken = max(alike, key=lambda each: (each.index in extended, each.delivered, each.index))
        if index not in extended and taken is not turn:
            roles[index] = "resample"
    return roles


def drop(ledger: dict[str, Any], reason: str, tokens: int) -> None:
    ledger["dropped"][reason] = ledger["dropped"].get(reason, 0) + tokens


def answer_key(answer: dict[str, Any]) -> tuple[Any, ...]:
    """What an agent knows of a turn from the answer to it."""
    choice = answer["choices"][0]
    logprobs = tuple(entry["logprob"] for entry in choice["logprobs"]["content"])
    return frozen(choice["message"]), logprobs, answer["usage"]["prompt_tokens"]


def stored_key(turn: StoredTurn) -> tuple[Any, ...]:
    """The same, from the file."""
    return frozen(turn.reply), tuple(turn.logprobs), len(turn.prompt)


def said(key: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    """A key without what only sampling shows: a request after one of two equal samples names neither."""
    return None if key is None else (key[0], key[2])


def frozen(message: dict[str, Any]) -> str:
    """A message as something that can be compared and counted."""
    return repr(sorted(message.items()))

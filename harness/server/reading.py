"""What can be read of a session: its facts, its record, its samples.

Whoever polls reads the facts, which are as small as they sound. Records and samples are as long as the session and are
put together in another thread, from a snapshot. The binary form of the samples brings the record along, both of one
moment: a rollout is collected in one request.
"""

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response

from harness.errors import MalformedRequest
from harness.samples.codec import sample_to_binary, sample_to_json
from harness.samples.merge import count_empty, merge_branches
from harness.server.responses import json_response
from harness.sessions.record import RecordIds, empty_facts, empty_record, session_facts, session_record
from harness.sessions.session import Session
from harness.types import Json, Sample

MSGPACK = "application/msgpack"
"""Media type of the binary form."""

TRAILING_TURNS_DROPPED = "trailing_turns_dropped"
"""Warned of when samples are collected: turns after one that is not COMPLETED are in none (I3)."""

EMPTY_SAMPLES_DROPPED = "empty_samples_dropped"
"""Said when samples are collected: what was aborted before its first token is none."""

log = structlog.get_logger()


def asked_ids(request: Request) -> RecordIds:
    """Which columns of tokens the request wants in a record. Raises `MalformedRequest`."""
    asked = request.query_params.get("ids", RecordIds.DELTAS)
    if asked not in list(RecordIds):
        raise MalformedRequest(f"ids: expected one of {', '.join(RecordIds)}; got {asked[:64]!r}", param="ids")
    return RecordIds(asked)


def wants_binary(request: Request) -> bool:
    """The request asks for msgpack, by `?format=msgpack` or by its `accept` header. Raises `MalformedRequest`."""
    asked = request.query_params.get("format")
    if asked not in (None, "json", "msgpack"):
        raise MalformedRequest(f"format: expected json or msgpack; got {asked[:64]!r}", param="format")
    return asked == "msgpack" or (asked is None and MSGPACK in request.headers.get("accept", ""))


def facts_response(session_id: str, session: Session | None) -> Response:
    """The facts of a session; empty ones when there is none."""
    return json_response(empty_facts(session_id) if session is None else session_facts(session))


def record_response(session_id: str, session: Session | None, ids: RecordIds) -> Response:
    """The record of a session; an empty one when there is none."""
    return json_response(empty_record(session_id) if session is None else session_record(session, ids))


def samples_response(session: Session | None, live_version: int | None) -> Response:
    """`{"samples": [...]}` as JSON, under the live policy version where that is known."""
    return json_response({"samples": [sample_to_json(sample) for sample in _samples(session, live_version)]})


def collected_response(session_id: str, session: Session | None, live_version: int | None) -> Response:
    """Facts, record and samples of one moment as msgpack; the record is a JSON text, and has no token columns."""
    if session is None:
        facts, record = empty_facts(session_id), empty_record(session_id)
    else:
        facts, record = session_facts(session), session_record(session, RecordIds.NONE)
    samples: list[Json] = [sample_to_binary(sample) for sample in _samples(session, live_version)]
    body = {"facts": facts, "session": msgspec.json.encode(record), "samples": samples}
    return Response(msgspec.msgpack.encode(body), media_type=MSGPACK)


def _samples(session: Session | None, live_version: int | None) -> list[Sample]:
    if session is None:
        return []
    dropped = sum(len(branch.dropped) for branch in merge_branches(session.turns, session.config.selection))
    if dropped:
        log.warning(TRAILING_TURNS_DROPPED, session_id=session.session_id, turns=dropped)
    empty = count_empty(session.turns, session.config.selection)
    if empty:
        log.info(EMPTY_SAMPLES_DROPPED, session_id=session.session_id, samples=empty)
    return session.samples(live_version)

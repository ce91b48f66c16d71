"""Sessions as their owners use them: created, inspected, ended, collected, deleted.

Polls read facts, which are small. The binary form has samples and record of one moment, so one request collects a
rollout.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from functools import partial
from heapq import nsmallest
from http import HTTPStatus
from operator import attrgetter
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from harness.errors import MalformedRequest, TooMany
from harness.samples.delivery import take_one
from harness.samples.miles_codec import encode_for_miles
from harness.server.collecting import CollectingPlace, collect_json, collect_tensors, samples_of
from harness.server.http.access import require_admin
from harness.server.http.connection import ClientConnection
from harness.server.http.queries import parse_end_of_rollout, parse_first_turn, parse_list, parse_times
from harness.server.http.responses import json_response
from harness.server.http.wire import CollectRequest, EndRequest, parse_session_config, read_body, read_fields
from harness.server.registry import SessionRegistry
from harness.server.routes import SessionsApi
from harness.server.scripts import ScriptReader
from harness.server.teachers import Teachers
from harness.server.turns import TurnService
from harness.sessions.gate import Work
from harness.sessions.paging import SessionStub
from harness.sessions.record import (
    RecordIds,
    SessionStanding,
    SessionState,
    empty_facts,
    empty_record,
    session_facts,
    session_record,
    session_summary,
    session_times,
    session_totals,
)
from harness.sessions.session import Session
from harness.sessions.session_config import Recorded, SessionConfig

SAFETENSORS = "application/octet-stream"
"""Media type of the binary forms."""

_LONG_SCRIPT = 20_000  # bytes, encoded in a few milliseconds
_AT_ONCE = 200  # sessions listed in one step: two milliseconds
_MOST_TIMES = 10_000  # turns with times per answer, plus the rest of the last session

_encode = msgspec.json.Encoder().encode
_T = TypeVar("_T")


class OwnSessions(SessionsApi):
    """Owner requests for one server's sessions."""

    def __init__(self, turns: TurnService, sessions: SessionRegistry, teachers: Teachers) -> None:
        self._turns = turns
        self._teachers = teachers
        self._sessions = sessions
        self._settings = turns.settings
        self._collecting = CollectingPlace(lambda: len(turns.admitted))

    async def _create(self, request: Request) -> Response:
        body = await read_body(request, self._settings.limits)
        config = await self._read_config(body)
        client = ClientConnection.of(request)
        with client.watch():
            previous = None if config.inherits is None else await self._sessions.find_record(config.inherits)
            if config.resumes is not None or previous is not None:
                await self._turns.live.look()
            with self._turns.callers.present(client):
                await self._turns.gatekeeper.enter(Work.CREATE, client)
            most = self._settings.limits.sessions
            if len(self._sessions) >= most and config.resumes is None:
                raise TooMany(
                    f"expected at most {most} sessions at once (the server's limit `sessions`); delete some",
                    limit="sessions",
                )
            # No `await` in between, so a drain meets either the gate or the session.
            session = await self._sessions.open(config, self._turns.live.version, previous)
        base = self._settings.public_url or str(request.base_url)
        return json_response(
            {
                "session_id": session.session_id,
                "base_url": f"{base.rstrip('/')}/sessions/{session.session_id}",
                "api_key": session.api_key,
            }
        )

    async def _read_config(self, body: bytes) -> SessionConfig:
        turns, settings = self._turns, self._settings
        read = ScriptReader(turns.chat_tokenizer, settings, turns.engine.capabilities).read
        work = partial(
            parse_session_config, body, settings.matchings, settings.selections, settings.limits, read_script=read
        )
        is_long = settings.allow_forced_tokens and len(body) > _LONG_SCRIPT
        config = await turns.heavy_work.do(len(body), work) if is_long else work()
        engine = turns.engine.capabilities
        returned = {
            Recorded.ROUTED_EXPERTS: engine.routed_experts is not None,
            Recorded.SAMPLING_MASK: engine.max_mask_ids > 0,
        }
        if missing := [kind for kind in config.record if not returned[kind]]:
            raise MalformedRequest(
                f"record: expected no {missing[0]}, the {engine.engine} engine of this server returns none; see"
                " docs/replay.md",
                param="record",
            )
        if Recorded.SAMPLING_MASK in config.record and (config.sampling.top_k or 0) > engine.max_mask_ids:
            raise MalformedRequest(
                f"sampling.top_k: expected at most {engine.max_mask_ids} with sampling masks, the engine's bound; got"
                f" {config.sampling.top_k}",
                param="sampling.top_k",
            )
        names = self._teachers.names if config.teachers is None else config.teachers
        if not set(names).issubset(self._teachers.names):
            raise MalformedRequest(
                f"teachers: expected some of {', '.join(self._teachers.names) or 'none, which this server has'};"
                f" got {', '.join(names)}",
                param="teachers",
            )
        turns.chat_tokenizer.with_variables(config.template_variables)  # early, where the error can name the variable
        return replace(config, teachers=names)

    async def _list_all(self, request: Request) -> Response:
        wanted = parse_list(request.query_params)
        quarantined = [
            {"session_id": damaged.session_id, "reason": damaged.reason} for damaged in self._sessions.quarantined
        ]
        held = self._sessions if wanted.ids is None else map(self._sessions.look, wanted.ids)
        standings = [self._stand(session) async for session in _in_turn(held) if session is not None]
        admitted = self._turns.admitted
        totals = session_totals(standings, admitted.recorded, admitted.sampled + admitted.arriving_in_all)
        if wanted.limit is not None:
            standings = nsmallest(wanted.limit, standings, key=attrgetter("order"))
        return json_response(
            {
                "sessions": [msgspec.Raw(_encode(session_summary(each))) async for each in _in_turn(standings)],
                "quarantined": quarantined,
                "totals": totals,
                "workers": [status._asdict() for status in self._turns.engine.workers],
            }
        )

    async def _times(self, request: Request) -> Response:
        # Does not count as use, and loads no evicted session.
        times: dict[str, list[tuple[int, float, float | None, str]]] = {}
        left_off: list[str] = []
        rows = 0
        for session_id, since in parse_times(request.query_params).items():
            if rows >= _MOST_TIMES:
                left_off.append(session_id)
            elif (session := self._sessions.in_memory(session_id)) is not None:
                times[session_id] = session_times(session, since)
                rows += len(times[session_id])
                await asyncio.sleep(0)
        return json_response({"now": self._turns.clock(), "times": times, "left_off": left_off})

    def _stand(self, session: Session | SessionStub) -> SessionStanding:
        turns, session_id = self._turns, session.session_id
        if not self._sessions.has_call(session_id) and not session.turns_in_flight:
            return SessionStanding(
                session, SessionState.TOOL if session.is_open else SessionState.ENDED, session.sampled
            )
        state = SessionState.QUEUED
        if session_id in turns.gatekeeper.held_by_session:
            state = SessionState.HELD
        elif turns.admitted.is_sampling(session):
            state = SessionState.ENGINE
        return SessionStanding(session, state, session.sampled + turns.admitted.arriving(session))

    async def _record(self, request: Request) -> Response:
        if request.method == "HEAD":
            return Response(media_type="application/json")
        require_admin(request.headers, self._settings.admin_token)
        columns = request.query_params.get("ids", RecordIds.DELTAS)
        if columns not in list(RecordIds):
            raise MalformedRequest(f"ids: expected one of {', '.join(RecordIds)}; got {columns[:64]!r}", param="ids")
        since = parse_first_turn(request.query_params)
        async with self._collecting.taken():
            session_id, session = await self._snapshot(request)
            if session is None:
                return json_response(empty_record(session_id))
            return await self._collecting.do(lambda: json_response(session_record(session, RecordIds(columns), since)))

    async def _facts(self, request: Request) -> Response:
        session_id = request.path_params["id"]
        return _facts_response(session_id, await self._sessions.find(session_id))

    async def _samples(self, request: Request) -> Response:
        form = request.query_params.get("format")
        if form not in (None, "json", "safetensors"):
            raise MalformedRequest(f"format: expected json or safetensors; got {form[:64]!r}", param="format")
        await self._catch_up(request)
        async with self._collecting.taken():
            live_version = self._turns.live.version
            session_id, session = await self._snapshot(request, with_rows=True)
            if form == "safetensors" or (form is None and SAFETENSORS in request.headers.get("accept", "")):
                collected = await self._collecting.do(lambda: collect_tensors(session_id, session, live_version))
                return Response(collected, media_type=SAFETENSORS)
            return await self._collecting.do(lambda: json_response(collect_json(session, live_version)))

    async def _samples_for_miles(self, request: Request) -> Response:
        asked = await read_fields(request, self._settings.limits, CollectRequest)
        await self._catch_up(request)
        async with self._collecting.taken():
            live_version = self._turns.live.version
            _, session = await self._snapshot(request, with_rows=True)

            def encode() -> bytes:
                samples = [] if session is None else samples_of(session, live_version)
                samples = take_one(samples) if asked.metadata is None else samples
                turns = [] if session is None else session.turns
                decode = self._turns.chat_tokenizer.tokenizer.decode
                return encode_for_miles(samples, turns, decode, max_seq_len=asked.max_seq_len, metadata=asked.metadata)

            return Response(await self._collecting.do(encode), media_type=SAFETENSORS)

    async def _drain(self, request: Request) -> Response:
        session_id = request.path_params["id"]
        session = await self._sessions.find(session_id)
        if session is not None:
            try:
                await self._sessions.drain(session)
            finally:  # in force even if the store failed: waiting calls get their answer
                self._turns.gatekeeper.look_again()
        return _facts_response(session_id, session)

    async def _end(self, request: Request) -> Response:
        asked = await read_fields(request, self._settings.limits, EndRequest)
        session_id = request.path_params["id"]
        session = await self._sessions.find(session_id)
        if session is not None:
            try:
                with self._turns.callers.attend(ClientConnection.of(request)):
                    await self._sessions.end(session, within_s=asked.within_s)
            finally:  # in force even if the wait failed: waiting calls get their answer
                self._turns.gatekeeper.look_again()
        return _facts_response(session_id, session)

    async def _delete(self, request: Request) -> Response:
        session_id, end = request.path_params["id"], parse_end_of_rollout(request.query_params)
        for damaged in self._sessions.quarantined:
            if damaged.session_id == session_id:
                await self._sessions.give_up(damaged)
        session = self._sessions.look(session_id)
        if session is not None:
            try:
                await self._sessions.close(session, end=end)
            finally:  # in force even if the store failed: waiting calls get their answer
                self._turns.gatekeeper.look_again()
        return Response(status_code=HTTPStatus.NO_CONTENT)

    async def _catch_up(self, request: Request) -> None:
        session = await self._sessions.find(request.path_params["id"])
        if session is not None:
            await self._teachers.catch_up(session)
        await self._turns.live.look()

    async def _snapshot(self, request: Request, *, with_rows: bool = False) -> tuple[str, Session | None]:
        session_id = request.path_params["id"]
        session = await self._sessions.find(session_id)
        if session is None:
            return session_id, None
        frozen = session.snapshot()
        if with_rows and frozen.records_rows:
            frozen.put_rows(await self._turns.store.load_rows(session_id))
        return session_id, frozen


async def _in_turn(items: Iterable[_T]) -> AsyncIterator[_T]:
    for number, item in enumerate(items, 1):
        yield item
        if number % _AT_ONCE == 0:
            await asyncio.sleep(0)


def _facts_response(session_id: str, session: Session | None) -> Response:
    return json_response(empty_facts(session_id) if session is None else session_facts(session))

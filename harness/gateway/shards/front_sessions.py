"""Placement of sessions on shards, and forwarding by session id.

A creation waits at the front's own gate, so a dying shard does not lose it. The front chooses the session id. If a
shard's answer is lost, the front creates the session on another shard, and deletes the orphan once the first shard
answers again. It also deletes the session of an owner that left.

All other owner requests are safe to repeat, so the front retries them while the shard restarts.
"""

import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
from starlette.datastructures import URL
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_fixed

from harness.errors import ClientLeft, HarnessError, Misdirected, ShardLost, ShardUnavailable
from harness.gateway.shards.placement import Wish, read_wish
from harness.gateway.shards.shard_client import VERB_S, ShardClient, ShardClients
from harness.server.gatekeeper import Gatekeeper
from harness.server.http.access import credential, require_admin
from harness.server.http.connection import Callers, ClientConnection
from harness.server.http.queries import parse_list, parse_times
from harness.server.http.responses import json_response
from harness.server.http.wire import read_body
from harness.server.registry import API_KEY_PREFIX
from harness.server.routes import SessionsApi
from harness.server.settings import ServerSettings
from harness.sessions.gate import Work
from harness.sessions.record import add_totals, busiest_summaries
from harness.sessions.shard_ids import ShardPlace
from harness.types import Json

RESTART_S = 10.0
"""Longest wait for a starting shard."""

_ATTEMPTS = 4  # to create a session, because several shards may die in a row
_READ_S = 60.0  # longest silence within an answer
_END_S = 630.0  # the same for an end, which waits for turns
_METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH"]
_KEPT = ("content-type", "content-length", "retry-after", "x-should-retry")


@dataclass(frozen=True)
class FrontSessions(SessionsApi):
    links: ShardClients
    gatekeeper: Gatekeeper
    callers: Callers
    settings: ServerSettings

    def redirects(self) -> list[Route]:
        """Return the routes of model calls, which only the session's shard serves."""
        return [
            Route(f"{base}/{calls}/{{rest:path}}", self._redirect, methods=_METHODS)
            for base in ("/sessions/{id}", "")
            for calls in ("v1", "{version}/models")
        ]

    async def _create(self, request: Request) -> Response:
        wish = read_wish(await read_body(request, self.settings.limits))
        only = wish.find_place(len(self.links))
        client = ClientConnection.of(request)
        with client.watch():
            with self.callers.present(client):
                await self.gatekeeper.enter(Work.CREATE, client)
            for attempts_left in reversed(range(_ATTEMPTS)):
                link = await self._wait_for_shard(only, client)
                try:
                    return await self._create_at(link, wish, request, client)
                except ShardUnavailable as error:
                    # A takeover or an id of the owner's choice fixes the shard, so it is tried once.
                    if isinstance(error, ShardLost) and not wish.is_repeatable:
                        raise
                    if not attempts_left:  # a leftover session is deleted, so the client may retry
                        raise ShardUnavailable(error.message) from error
        raise AssertionError("the last attempt returns or raises")

    async def _wait_for_shard(self, only: int | None, client: ClientConnection) -> ShardClient:
        found: list[ShardClient] = []

        def choose() -> bool:
            link = self.links.choose(only)
            if link is not None:
                found.append(link)
            return bool(found)

        try:
            with client.patience(RESTART_S):
                await self.gatekeeper.until(choose)
        except TimeoutError:
            problems = (f"shard {link.number} {link.problem}" for link in self.links if only in (None, link.number))
            raise ShardUnavailable(f"no shard for the session within {RESTART_S:g} s: {'; '.join(problems)}") from None
        return found[0]

    async def _create_at(self, link: ShardClient, wish: Wish, request: Request, client: ClientConnection) -> Response:
        place = ShardPlace(link.number, len(self.links))
        session_id = wish.session_id or place.mark(secrets.token_hex(16))
        link.placed += 1
        ask = link.ask_while_it_serves if wish.is_repeatable else link.ask
        try:
            with client.patience(self.settings.pause_timeout_s + VERB_S):  # its gate may have closed
                answer = await ask("POST", "/sessions", wish.with_id(session_id))
        except (ShardLost, ClientLeft, TimeoutError) as error:
            if wish.is_repeatable:
                link.orphans.add(session_id)
            if isinstance(error, HarnessError):
                raise
            raise ShardLost(f"shard {link.number} did not answer a request to create a session") from None
        if answer.status != HTTPStatus.OK:
            return Response(answer.body, answer.status, _kept(answer.headers))
        created = answer.read(dict[str, Any])
        base = f"{self._address_of(link, request)}/sessions/{session_id}"
        return json_response({**created, "base_url": base})

    async def _list_all(self, request: Request) -> Response:
        limit = parse_list(request.query_params).limit
        query = f"?{request.url.query}" if request.url.query else ""
        asked = await self.links.fetch(_Listed, _READ_S, f"/sessions{query}")
        lists = asked.some
        sessions: Sequence[Any] = [each for listed in lists for each in listed.sessions]
        if limit is not None:
            sessions = busiest_summaries([msgspec.json.decode(each) for each in sessions], limit)
        return json_response(
            {
                "sessions": sessions,
                "quarantined": [each for listed in lists for each in listed.quarantined],
                "totals": add_totals(listed.totals for listed in lists),
                "workers": [
                    {**worker, "shard": number} for number, each in asked.answers.items() for worker in each.workers
                ],
                "problems": asked.problems,
            }
        )

    async def _times(self, request: Request) -> Response:
        wanted: dict[int, list[str]] = {}
        for session_id, since in parse_times(request.query_params).items():
            wanted.setdefault(self.links.find(session_id).number, []).append(f"from={quote(session_id)}:{since}")

        async def ask(link: ShardClient) -> _Times | None:
            if link.number not in wanted:
                return None
            return (await link.ask("GET", f"/sessions/times?{'&'.join(wanted[link.number])}")).read(_Times)

        asked = await self.links.ask(ask, _READ_S)
        found = [each for each in asked.some if each]
        times = {session_id: rows for each in found for session_id, rows in each.times.items()}
        left_off = [session_id for each in found for session_id in each.left_off]
        return json_response(
            {"now": self.gatekeeper.clock(), "times": times, "left_off": left_off, "problems": asked.problems}
        )

    async def _record(self, request: Request) -> Response:
        if request.method == "HEAD":
            return Response(media_type="application/json")
        require_admin(request.headers, self.settings.admin_token)
        return await self._forward(request)

    async def _forward(self, request: Request) -> Response:
        body = await read_body(request, self.settings.limits) if request.method == "POST" else None
        link = self.links.find(request.path_params["id"])
        path = request.scope["raw_path"].decode("ascii") + (f"?{request.url.query}" if request.url.query else "")
        silence_s = _END_S if request.url.path.endswith("/end") else _READ_S
        accept = request.headers.get("accept", "*/*")

        # Retried while the shard restarts; the answer streams through as it arrives.
        async def ask() -> Response:
            stack = AsyncExitStack()
            answer = link.answer(request.method, path, body, accept=accept, silence_s=silence_s)
            response = await stack.enter_async_context(answer)
            return StreamingResponse(_content(stack, response), response.status, _kept(response.headers))

        return await AsyncRetrying(
            retry=retry_if_exception_type(ShardUnavailable),
            wait=wait_fixed(0.1),
            stop=stop_after_delay(RESTART_S),
            reraise=True,
        )(ask)

    _drain = _end = _delete = _facts = _samples = _samples_for_miles = _forward

    async def _redirect(self, request: Request) -> Response:
        # Refused rather than redirected: a client that follows a redirect to another port drops its key.
        digits = request.path_params.get("id") or credential(request.headers).removeprefix(API_KEY_PREFIX)
        address = self._address_of(self.links.find(digits), request)
        beginning = f"/sessions/{request.path_params['id']}" if "id" in request.path_params else ""
        raise Misdirected(
            "this is the front of several servers and serves no turns: use the base_url of POST /sessions, which begins"
            f" with {address}{beginning}"
        )

    def _address_of(self, link: ShardClient, request: Request) -> str:
        # The shard's own port, at the public name or the name in the client's request.
        base = URL(self.settings.public_url or str(request.base_url))
        return str(base.replace(port=link.port)).rstrip("/")


class _Listed(msgspec.Struct):
    sessions: list[msgspec.Raw]
    quarantined: list[msgspec.Raw]
    totals: Json
    workers: list[Json]


class _Times(msgspec.Struct):
    times: dict[str, msgspec.Raw]
    left_off: list[str] = []


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: headers[name] for name in _KEPT if name in headers}


async def _content(stack: AsyncExitStack, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async with stack:
        async for chunk in response.content.iter_any():
            yield chunk

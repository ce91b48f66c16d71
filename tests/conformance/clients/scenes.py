"""What happens to clients: two drains, a long pause, a refusal. All libraries play a scene at the same time."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import httpx
import msgspec

from harness.engines.scripted import Script, ScriptedEngine, ScriptedFault, ScriptStep
from harness.rollouts.client.session_server import SessionHandle
from harness.server.serving import serve
from harness.server.settings import ServerSettings
from harness.server.store.memory import MemoryStore
from tests.builders import toy_template
from tests.conformance.clients.players import (
    LIBRARIES,
    PATIENCE_S,
    SCRIPT,
    ClientLibrary,
    Command,
    Ending,
    Player,
    playing,
    prepare_cast,
)
from tests.conformance.clients.witness import Witness

PAUSE_S = 20
TALKATIVE = ServerSettings(comment_every_s=0.5)
INTERRUPTED = (SCRIPT[0], msgspec.structs.replace(SCRIPT[1], fault=ScriptedFault.HANG, fault_after=3), *SCRIPT[2:])
"""The second turn comes to its end only when it is aborted and continued."""
STOPS_WITHIN_S = 30  # three times what is promised, so that a slow client is a figure and not a missing one


class Played(NamedTuple):
    """What one client did in a scene."""

    ending: Ending
    requests: int
    """How often it asked, all in all."""
    streamed: int
    """How many answers came as a stream."""
    refusals: Mapping[str, int]
    """How often it was refused, by error code."""
    sample_turns: list[list[int]]
    """The turns of each sample that its session gives."""
    seconds: float
    """From what happened to the end of its process."""


Cast = Mapping[ClientLibrary, Command]
"""Who plays, and the command of each program."""
Outcome = Mapping[ClientLibrary, Played]


@dataclass(frozen=True, slots=True)
class Scene:
    """A server, the clients that play against it, and who counts their requests."""

    engine: ScriptedEngine
    server: httpx.AsyncClient
    witness: Witness
    players: Mapping[ClientLibrary, Player]

    async def turn_gate(self, verb: str) -> None:
        """`POST /sessions/<verb>`."""
        (await self.server.post(f"/sessions/{verb}")).raise_for_status()

    async def reach_tool(self) -> None:
        """Return once every client waits in its tool."""
        await asyncio.gather(*(player.reaches_tool() for player in self.players.values()))

    def leave_tool(self, *, times: int = 1) -> None:
        """Let every tool answer."""
        for player in self.players.values():
            player.leaves_tool(times)

    async def become(self, field: str, count: int) -> None:
        """Return once the gate's report says that `field` is `count`."""
        async with asyncio.timeout(PATIENCE_S):
            while (await self.server.get("/sessions/gate")).json()[field] != count:
                await asyncio.sleep(0.02)

    async def all_streamed(self, count: int) -> None:
        """Return once every client that streams has seen `count` answers begin."""
        streaming = [player.session_id for library, player in self.players.items() if library.streams]
        async with asyncio.timeout(PATIENCE_S):
            while any(self.witness.streamed[session_id] < count for session_id in streaming):
                await asyncio.sleep(0.02)

    async def all_refused(self, code: str) -> None:
        """Return once every client has had a turn refused with `code`."""
        async with asyncio.timeout(PATIENCE_S):
            while await self._refused(code) < len(self.players):
                await asyncio.sleep(0.02)

    async def _refused(self, code: str) -> int:
        return sum([code in await self._refusals(player) for player in self.players.values()])

    async def _refusals(self, player: Player) -> Mapping[str, int]:
        refusals: Mapping[str, int] = (await self.server.get(f"/sessions/{player.session_id}")).json()["refusals"]
        return refusals

    async def end(self, within_s: float) -> Outcome:
        """What every client did, now that it is given `within_s` to end."""
        began = time.monotonic()
        endings = await asyncio.gather(*(player.ends(within_s) for player in self.players.values()))
        return {
            library: await self._played(player, ending, ending.at - began)
            for (library, player), ending in zip(self.players.items(), endings, strict=True)
        }

    async def _played(self, player: Player, ending: Ending, seconds: float) -> Played:
        samples = (await self.server.get(f"/sessions/{player.session_id}/samples")).json()["samples"]
        turns = [sample["metadata"]["turns"] for sample in samples]
        requests, streamed = self.witness.requests[player.session_id], self.witness.streamed[player.session_id]
        return Played(ending, requests, streamed, await self._refusals(player), turns, seconds)


async def drained_between_turns(cast: Cast) -> Outcome:
    """The server is drained while every client is in its tool; the next turn is refused."""
    async with scene(cast) as stage:
        await stage.reach_tool()
        await stage.turn_gate("drain")
        stage.leave_tool(times=len(SCRIPT))
        return await stage.end(STOPS_WITHIN_S)


async def drained_in_flight(cast: Cast) -> Outcome:
    """The server is drained and the engine told to abort while every client waits for its second turn.

    The answers of those that stream have begun by then.
    """
    async with scene(cast, INTERRUPTED) as stage:
        await stage.reach_tool()
        stage.leave_tool(times=len(SCRIPT))
        await stage.become("turns_in_flight", len(cast))
        await stage.all_streamed(2)
        await stage.turn_gate("drain")
        await stage.engine.abort(None)
        return await stage.end(STOPS_WITHIN_S)


async def paused(cast: Cast) -> Outcome:
    """The gate is shut for `PAUSE_S` and the engine told to abort while every client waits for its second turn."""
    async with scene(cast, INTERRUPTED) as stage:
        await stage.reach_tool()
        stage.leave_tool(times=len(SCRIPT))
        await stage.become("turns_in_flight", len(cast))
        await stage.turn_gate("pause")
        await stage.engine.abort(None)
        await stage.become("held", len(cast))
        await asyncio.sleep(PAUSE_S)
        await stage.turn_gate("resume")
        return await stage.end(PATIENCE_S)


async def refused_for_a_while(cast: Cast) -> Outcome:
    """The second turn is answered 503 with Retry-After until all have been told: the gate holds nothing."""
    async with scene(cast, settings=replace(TALKATIVE, pause_timeout_s=0.05)) as stage:
        await stage.reach_tool()
        await stage.turn_gate("pause")
        stage.leave_tool(times=len(SCRIPT))
        await stage.all_refused("gate_closed")
        await stage.turn_gate("resume")
        return await stage.end(PATIENCE_S)


@asynccontextmanager
async def scene(
    cast: Cast, script: Sequence[ScriptStep] = SCRIPT, settings: ServerSettings = TALKATIVE
) -> AsyncIterator[Scene]:
    """A server whose model says `script` to each client of `cast`."""
    chat_tokenizer = toy_template()
    engine = ScriptedEngine(chat_tokenizer.tokenizer, Script(tuple(script)))
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(serve(engine, chat_tokenizer, MemoryStore(), settings))
        witness = await stack.enter_async_context(Witness.of(running.url))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S))
        players = {}
        for library, command in cast.items():
            session = SessionHandle(**(await http.post("/sessions", json={})).json())
            players[library] = await stack.enter_async_context(playing(library, command, session, witness.url))
        yield Scene(engine, http, witness, players)


class Findings(NamedTuple):
    """What every client did in every scene."""

    drained_between_turns: Outcome
    drained_in_flight: Outcome
    paused: Outcome
    refused_for_a_while: Outcome


async def play_all() -> Findings:
    """Every scene with every client; the other scenes are played during the long pause."""
    cast = await prepare_cast(LIBRARIES)
    async with asyncio.TaskGroup() as group:
        pause = group.create_task(paused(cast))
        between = await drained_between_turns(cast)
        in_flight = await drained_in_flight(cast)
        refused = await refused_for_a_while(cast)
    return Findings(between, in_flight, pause.result(), refused)

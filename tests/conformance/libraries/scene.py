"""Each library's program plays a conversation with each model, with whole answers and with streams.

python -m tests.conformance.libraries.scene CAST.json FINDINGS.json
"""

import asyncio
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple

import httpx
import msgspec

from harness.engines.scripted import Script, ScriptedEngine, ScriptStep
from harness.rollouts.agents.profile import expand
from harness.rollouts.agents.programs import prepare_agent
from harness.rollouts.client.session_server import SessionHandle
from harness.server.serving import serve
from harness.server.store.base import MemoryStore
from harness.server.telemetry.logging import configure_logging
from harness.tokens.tokenizer import Tokenizer
from harness.types import GenerationRequest, GenerationResult
from tests.conformance.agents.staged_engine import SIDE_ANSWER
from tests.conformance.clients.players import variables_of
from tests.conformance.clients.witness import Witness
from tests.conformance.families.family import load
from tests.conformance.libraries.casts import LIBRARIES, QWEN2_5, QWEN3, Library, script
from tests.run_to_end import run_to_end

PATIENCE_S = 240
"""For a program with all its conversations: some import for ten seconds, and several start at once on few cores."""
AT_A_TIME = 3


class Played(msgspec.Struct, frozen=True):
    """The outcome of one conversation."""

    answers: list[str]
    """The words that the program was told, or the error that ended its conversation."""
    turns: int
    """Turns of the conversation, by the engine's log."""
    side_calls: int
    """Requests without tools."""
    streamed: int
    """Answers that came as a stream."""
    roots: int
    leaves: int
    is_exact: bool
    """Prompt and output of each turn begin the next one's prompt, by the engine's log."""
    is_one_sample: bool
    """The one sample is the engine's log of the last turn, all outputs trained."""
    unaccounted: int
    """The ledger's difference."""
    respelled: list[str]
    """Fields of replies that came back otherwise than they were recorded, and were recognized."""


class Conversation(NamedTuple):
    """A conversation of a program, and the family that answers."""

    dialect: str
    streams: bool
    family: str

    @property
    def name(self) -> str:
        """The key among findings."""
        return f"{self.dialect} {'streamed' if self.streams else 'whole'} {self.family}"


Findings = dict[str, dict[str, Played]]
"""By program and by `Conversation.name`."""


class Asked(NamedTuple):
    """One request that the engine answered."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    is_side_call: bool
    """It offered no tools."""


class LoggingEngine(ScriptedEngine):
    """Plays its script to the conversation of every session, and logs requests and results by session."""

    def __init__(self, tokenizer: Tokenizer, steps: Sequence[ScriptStep]) -> None:
        super().__init__(tokenizer, Script((SIDE_ANSWER, *steps)))
        self.log: defaultdict[str, list[Asked]] = defaultdict(list)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Play the next step of the conversation, or the answer to a side call."""
        session_id = request.session_id or ""
        is_side_call = "<tools>" not in self._tokenizer.decode(request.input_ids.tolist())
        answered = sum(not asked.is_side_call for asked in self.log[session_id])
        self.play_from(session_id, 0 if is_side_call else 1 + answered)
        result = await super().generate(request)
        self.log[session_id].append(Asked(tuple(request.input_ids), tuple(result.output_ids), is_side_call))
        return result


class Server(NamedTuple):
    """A session server whose model plays the conversation."""

    http: httpx.AsyncClient
    witness: Witness
    log: Mapping[str, Sequence[Asked]]

    async def create(self) -> tuple[str, dict[str, str]]:
        """A session by default options: its id, and the variables by which a program finds it."""
        session = SessionHandle(**(await self.http.post("/sessions", json={})).json())
        url = f"{self.witness.url}/sessions/{session.session_id}"
        return session.session_id, variables_of(url, session.api_key)

    async def played(self, session_id: str, answers: list[str]) -> Played:
        """The outcome of the session that was told `answers`."""
        record = (await self.http.get(f"/sessions/{session_id}")).json()
        sampled = (await self.http.get(f"/sessions/{session_id}/samples")).json()["samples"]
        turns = list(zip(record["turns"], self.log[session_id], strict=True))
        main = {index: turn["parent"] for index, (turn, asked) in enumerate(turns) if not asked.is_side_call}
        log = [asked for asked in self.log[session_id] if not asked.is_side_call]
        ledger = record["ledger"]
        gone = ledger["trained"] + ledger["masked"] + sum(ledger["dropped"].values())
        return Played(
            answers=answers,
            turns=len(log),
            side_calls=len(turns) - len(log),
            streamed=self.witness.streamed[session_id],
            roots=[*main.values()].count(None),
            leaves=len(main.keys() - {*main.values()}),
            is_exact=all(
                after.prompt[: len(before.prompt + before.output)] == before.prompt + before.output
                for before, after in pairwise(log)
            ),
            is_one_sample=bool(log)
            and [sample["tokens"] for sample in sampled] == [[*log[-1].prompt, *log[-1].output]]
            and sum(sampled[0]["loss_mask"]) == sum(len(asked.output) for asked in log),
            unaccounted=ledger["generated"] - gone,
            respelled=sorted({each["field"] for turn, _ in turns for each in turn["notes"].get("matched_loosely", ())}),
        )


@asynccontextmanager
async def serving(family: str) -> AsyncIterator[Server]:
    """A server of `family`, which thinks where that is Qwen3."""
    chat = load(family).chat
    engine = LoggingEngine(chat.tokenizer, script(thinks=family == QWEN3))
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(serve(engine, chat, MemoryStore()))
        witness = await stack.enter_async_context(Witness.of(running.url))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S))
        yield Server(http, witness, engine.log)


class Program(msgspec.Struct, frozen=True):
    """A library's program, installed."""

    command: tuple[str, ...]
    env: dict[str, str]


Cast = dict[str, Program]
"""By the name of the library."""


async def prepare_cast(libraries: Sequence[Library]) -> Cast:
    """The programs of `libraries`; their environments are in the caches afterwards."""
    agents = {library.name: await prepare_agent(library.script) for library in libraries}
    return {name: Program(agent.command, dict(agent.env)) for name, agent in agents.items()}


async def play_all(cast: Cast) -> Findings:
    """Every conversation of every program, a few programs at a time."""
    libraries = [library for library in LIBRARIES if library.name in cast]
    places = asyncio.Semaphore(AT_A_TIME)
    async with serving(QWEN3) as thinks, serving(QWEN2_5) as plain:
        servers = {QWEN3: thinks, QWEN2_5: plain}

        async def play(library: Library) -> dict[str, Played]:
            async with places:
                return await play_one(library, cast[library.name], servers)

        played = await asyncio.gather(*map(play, libraries))
    return {library.name: each for library, each in zip(libraries, played, strict=True)}


async def play_one(library: Library, program: Program, servers: Mapping[str, Server]) -> dict[str, Played]:
    """Every conversation of the program of `library`, by `Conversation.name`."""
    conversations = [Conversation(*each) for each in product(library.dialects, library.streams, servers)]
    sessions = [await servers[each.family].create() for each in conversations]
    asked = [each._asdict() | {"env": env} for each, (_, env) in zip(conversations, sessions, strict=True)]
    told = await run_program(program, asked)
    return {
        each.name: await servers[each.family].played(session_id, answers)
        for each, (session_id, _), answers in zip(conversations, sessions, told, strict=True)
    }


async def run_program(program: Program, conversations: list[dict[str, object]]) -> list[list[str]]:
    """The words that each of `conversations` ended with, or the errors; nothing of the program outlives the call."""
    with tempfile.TemporaryDirectory(prefix="library-") as home:
        variables = {
            "PATH": os.environ["PATH"],
            "HOME": home,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it is asked of GitHub, three times
            "CONVERSATIONS": json.dumps(conversations),
            **program.env,
        }
        command = [expand(word, variables) for word in program.command]
        try:
            _, output, errors = await run_to_end(*command, within_s=PATIENCE_S, cwd=home, env=variables)
        except TimeoutError:
            output, errors = "", f"not ended within {PATIENCE_S} s"
    told = [json.loads(line) for line in output.splitlines() if line.startswith('["')]
    return told + [[errors[-2_000:]]] * (len(conversations) - len(told))


def main() -> None:
    """Play and write what was found."""
    configure_logging("error")
    prepared, findings = map(Path, sys.argv[1:])
    cast = msgspec.json.decode(prepared.read_bytes(), type=Cast)
    findings.write_bytes(msgspec.json.encode(asyncio.run(play_all(cast))))


if __name__ == "__main__":
    main()

"""A server process that is killed again and again under agents that retry: I1, I4, I5, I9 and I12 at the file.

Real processes, real sockets, SIGKILL at any moment, between drains, pauses and hang-ups. `HARNESS_SOAK_KILLS` says how
often; `make soak` asks for more than `make test`.
"""

import asyncio
import os
import random
from collections import Counter
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import pytest

from harness.engines.scripted import scripted_experts
from harness.server.store.sqlite import read_rows
from harness.token_rows import TokenRows, TurnRows
from harness.types import as_ids
from tests.builders import body, user
from tests.free_ports import free_ports
from tests.session_servers.asked_bodies import is_digest_of
from tests.session_servers.served import RawClient
from tests.session_servers.store_file import StoredSession, StoredTurn, ledger_of, read_file
from tests.session_servers.true_rows import ROUTER
from tests.system.server.test_crash import server_process

KILLS = int(os.environ.get("HARNESS_SOAK_KILLS", "6"))
AGENTS = 8
LONGEST_LIFE_S = 1.0
PATIENCE_S = 120
RECORD = {"record": ["routed_experts"]}


class Fleet:
    """The server, whichever process it is now, and what its agents know."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.port = free_ports()
        self.url = f"http://127.0.0.1:{self.port}"
        self.answers: Counter[tuple[str, bytes, tuple[float, ...]]] = Counter()
        """By session, request and logprobs; a replay is the same answer again."""
        self.over = False


async def agent(fleet: Fleet, dice: random.Random) -> None:
    """Creates a session, talks, asks again whatever was not answered, and begins anew when it is told to stop."""
    async with httpx.AsyncClient(base_url=fleet.url, timeout=30) as http:
        while not fleet.over:
            with suppress(httpx.TransportError):
                answer = await http.post("/sessions", json={"sampling": {"seed": dice.randrange(1000)}, **RECORD})
                if answer.status_code == 200:
                    await talk(fleet, answer.json()["session_id"], dice)
            await asyncio.sleep(0.05)


async def talk(fleet: Fleet, session_id: str, dice: random.Random) -> None:
    messages = [user("begin")]
    while not fleet.over:
        content = body(messages, logprobs=True)
        answer = await asked_until_answered(fleet, f"/sessions/{session_id}/v1/chat/completions", content, dice)
        if answer is None:
            return
        choice = answer["choices"][0]
        logprobs = tuple(entry["logprob"] for entry in choice["logprobs"]["content"])
        fleet.answers[session_id, content, logprobs] += 1
        messages = [*messages, choice["message"], user("continue")]


async def asked_until_answered(fleet: Fleet, path: str, content: bytes, dice: random.Random) -> dict | None:
    """The answer; None when the session is over. Now and then the agent's patience ends early."""
    while not fleet.over:
        with suppress(OSError, asyncio.IncompleteReadError):
            status, answer = await asked_once(fleet, path, content, dice.choice([0.01, 5, 5, 5]))
            if status == 200:
                return answer
            assert status in (0, 404, 503), answer
            if status == 404:
                return None
        await asyncio.sleep(0.02)
    return None


async def asked_once(fleet: Fleet, path: str, content: bytes, patience_s: float) -> tuple[int, dict]:
    """Status and answer, status 0 when the patience ended.

    What this process has read counts as answered however late it looks: nobody could tell the server otherwise.
    """
    async with RawClient(fleet.url) as client:
        asking = asyncio.create_task(client.post(path, content))
        try:
            await asyncio.wait([asking], timeout=patience_s)
            client.stop_reading()
            for _ in range(5):
                await asyncio.sleep(0)
            return await asking if asking.done() else (0, {})
        finally:
            client.abort()
            asking.cancel()
            await asyncio.wait([asking])


async def operator(fleet: Fleet, dice: random.Random) -> None:
    """Pauses often, drains sometimes, and opens again."""
    async with httpx.AsyncClient(base_url=fleet.url, timeout=5) as http:
        while not fleet.over:
            await asyncio.sleep(dice.uniform(0.05, 0.3))
            verb = dice.choice(["pause", "pause", "pause", "drain"])
            with suppress(httpx.TransportError):
                await http.post(f"/sessions/{verb}")
                await asyncio.sleep(dice.uniform(0, 0.1))
            with suppress(httpx.TransportError):
                await http.post("/sessions/resume")


def check(fleet: Fleet) -> dict[str, StoredSession]:
    """What the file must say whenever the server is dead; `read_file` checks prompts and digests (I1)."""
    file = read_file(fleet.store)
    stored = {session_id: [turn for turn in each.turns.values() if turn.is_usable] for session_id, each in file.items()}
    for session_id, content, logprobs in fleet.answers:
        same = (turn for turn in stored[session_id] if tuple(turn.logprobs) == logprobs)
        assert any(is_digest_of(content, turn.request_digest) for turn in same), "an answer was lost (I9)"
    for session in file.values():
        prompts = Counter(turn.prompt_digest for turn in session.turns.values())  # each body of an agent has its own
        twice = [turn for turn in session.turns.values() if prompts[turn.prompt_digest] > 1]
        assert not twice, f"a retry was sampled again (I5): {[told_of(turn) for turn in twice]}"
        ledger = ledger_of(session)
        assert ledger["generated"] == ledger["trained"] + ledger["masked"] + sum(ledger["dropped"].values())
    for session_id, session in file.items():
        experts = {index: rows.experts for index, rows in read_rows(fleet.store, session_id).items() if rows.experts}
        for index, rows in experts.items():
            check_rows(session.turns[index], rows)
        assert {*experts} >= {index for index, turn in session.turns.items() if turn.output}
    return file


def check_rows(turn: StoredTurn, rows: TurnRows) -> None:
    """They follow each other up to the last token but one, and are those of the engine (I12)."""
    ids, stop = as_ids(turn.tokens), rows.start
    for part in rows.parts:
        assert part.start == stop
        stop = part.stop
        if isinstance(part, TokenRows):
            assert np.array_equal(part.values, scripted_experts(ROUTER, ids[part.start : stop], part.start, "0"))
    assert stop == (ids.size - 1 if turn.output else rows.start)


def continued_turns(file: dict[str, StoredSession]) -> list[StoredTurn]:
    return [turn for session in file.values() for turn in session.turns.values() if len(turn.segments) > 1]


def told_of(turn: StoredTurn) -> str:
    ends = [f"{each['request_id'][:4]}:{each['end']}{each['finish_reason']}" for each in turn.segments]
    return f"turn {turn.index} {turn.status}/{turn.end} delivered={turn.delivered} {ends}"


@pytest.mark.timeout(7200)
async def test_a_server_that_is_killed_again_and_again_loses_no_answer_and_samples_none_twice(tmp_path):
    """After every kill the file is checked, and the next server continues with it on the same port."""
    seed = int(os.environ.get("HARNESS_SOAK_SEED", "0"))
    dice = random.Random(seed)
    fleet = Fleet(tmp_path / "sessions.db")
    agents = [asyncio.create_task(agent(fleet, random.Random(f"{seed},{number}"))) for number in range(AGENTS)]
    agents.append(asyncio.create_task(operator(fleet, random.Random(seed + 1))))
    try:
        for _ in range(KILLS):
            async with server_process(fleet.store, "0", str(fleet.port)):
                await asyncio.sleep(dice.uniform(0.1, LONGEST_LIFE_S))
            check(fleet)
        async with server_process(fleet.store, "0", str(fleet.port)), asyncio.timeout(PATIENCE_S):
            while not continued_turns(read_file(fleet.store)):  # a busy machine may play none in seconds
                await asyncio.sleep(LONGEST_LIFE_S)
    finally:
        fleet.over = True
        endings = await asyncio.gather(*agents, return_exceptions=True)

    assert [ending for ending in endings if ending is not None] == []
    file = check(fleet)
    turns = sum(len(session.turns) for session in file.values())
    print(f"{KILLS} kills, {len(file)} sessions, {turns} turns, {len(continued_turns(file))} continued")
    assert fleet.answers
    assert continued_turns(file)

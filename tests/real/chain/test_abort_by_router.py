"""A trainer ends its rollout, and knows nothing of the engines but the router: one SGLang and one vLLM behind it.

No run of ours stands between: the manager, agents on the openai SDK, and the abort that every trainer writes.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness import AgentTask, ProgramAgent, Rollout, ServerSettings, SessionManager, prepare_agent, serve
from harness.gateway.router.gateway_program import GatewayProgram
from harness.gateway.router.routed import RouterSettings, open_routed
from harness.rollouts.client.connections import SessionServerAddress
from harness.rollouts.client.session_server import SessionServerClient
from harness.rollouts.control.abort_report import AbortBudget
from harness.samples.rollout import OutcomeKind
from harness.server.store.sqlite import open_store
from harness.tokens.model_family import open_chat_tokenizer
from harness.turn_ends import TurnEnd
from harness.types import Json
from tests.played_suites import incomplete_inside
from tests.real.chain.suite import SESSIONS, TURNS
from tests.real.chain.tool_loop import AGENT, CALL, CUT, ENDLESS, TOOL
from tests.session_servers.store_file import ledger_of, read_file

pytestmark = pytest.mark.agent

TOKEN = "t0ken"
PATIENCE_S = 600
BUDGET = AbortBudget(agents_s=30, engines_s=60, drain_s=60, collect_s=120, resume_s=60, total_s=400)

LOOP = {"steps": [*[CALL] * TURNS, ENDLESS]}
CUT_LOOP = {"steps": [CALL, CALL, CUT, *[CALL] * (TURNS - 3), ENDLESS]}
VERBS: dict[str, Json] = {
    "/pause_generation": {},
    "/continue_generation": {},
    "/abort_request": {"abort_all": True},
    "/flush_cache": {},
}
SHORT = {"steps": [CALL, CALL, {"text": "It is done."}]}


@dataclass(frozen=True)
class Chain:
    """The chain, and what its ends see."""

    manager: SessionManager
    http: httpx.AsyncClient
    """An operator's, to the router."""
    sessions: SessionServerClient
    agent: ProgramAgent
    workers: frozenset[str]
    directory: Path

    def begin(self, number: int, script: Json, **metadata: Any) -> asyncio.Task[Rollout]:
        """A rollout that plays `script`, of an agent with `metadata` that asks until its session is over."""
        task = AgentTask(
            self.agent,
            "Add.",
            self.directory / str(number),
            "policy",
            deadline_s=900,
            session={"script": script, "after_incomplete": "serve"},
            request_kwargs={"tools": [TOOL]},
            metadata={"calls": 100_000, **metadata},
        )
        return asyncio.create_task(self.manager.run(task))

    async def standing(self) -> dict[str, Json]:
        """Each worker, as the sessions' pool sees it."""
        workers = (await self.http.get("/router")).raise_for_status().json()["sessions"]["workers"]
        return {worker["name"]: worker for worker in workers}

    async def in_the_middle(self, count: int) -> set[str]:
        """Return once `count` sessions have had their turns and further ones are in flight; who was busy till then.

        Not both engines need be busy at the end: on two cores they are slow to answer a probe, and the router may keep
        one of them from serving for a while.
        """
        busy: set[str] = set()
        async with asyncio.timeout(PATIENCE_S):
            while True:
                sessions = await self.sessions.sessions()
                standing = await self.standing()
                busy |= {name for name, each in standing.items() if each["in_flight"] or each["sessions"]}
                in_flight = sum(each.turns_in_flight for each in sessions)
                if [each.turns for each in sessions] == [TURNS] * count and in_flight:
                    return busy
                await asyncio.sleep(0.05)


@asynccontextmanager
async def chain(model_dir: Path, program: GatewayProgram, directory: Path, *workers: str) -> AsyncIterator[Chain]:
    """A router in front of `workers`, and a manager that knows nothing of them but the router."""
    chat_tokenizer = open_chat_tokenizer(model_dir)
    script, store = directory / "agent.py", str(directory / "s.db")
    script.write_text(AGENT.lstrip())
    settings = ServerSettings(admin_token=TOKEN, allow_forced_tokens=True)
    opening = open_routed(
        RouterSettings(worker_urls=workers), program, vocab_size=chat_tokenizer.tokenizer.vocab_size, admin_token=TOKEN
    )
    async with (
        opening as routed,
        serve(routed.pool, chat_tokenizer, open_store(store), settings, around=routed.around) as server,
        SessionManager(server.url, admin_token=TOKEN, engines=[f"router={server.url}"]) as manager,
        SessionServerClient(SessionServerAddress(server.url, TOKEN)) as sessions,
        httpx.AsyncClient(
            base_url=server.url, headers={"authorization": f"Bearer {TOKEN}"}, timeout=PATIENCE_S
        ) as http,
    ):
        agent = await prepare_agent(script)
        agent = replace(agent, env={"MEETINGS": str(directory / "meetings")})
        made = Chain(manager, http, sessions, agent, frozenset(workers), directory)
        async with asyncio.timeout(PATIENCE_S):
            while {name for name, each in (await made.standing()).items() if not each["fence"]} != {*workers}:
                await asyncio.sleep(0.1)
        yield made


async def test_an_abort_in_the_middle_of_tool_loops(
    workers: Mapping[str, str], smg: GatewayProgram, model_dir: Path, tmp_path: Path
):
    """Eight agents on both engines, six turns and more each, then the rollout ends with turns in flight.

    One turn of every second session was cut on the way: what came behind it is in no sample, and counted. Every token
    is accounted for, by a reader of the file too; nothing is left in the engines, and the next rollouts are served.
    """
    async with chain(model_dir, smg, tmp_path, *workers.values()) as made:
        for verb, body in VERBS.items():
            answer = await made.http.post(verb, json=body)
            assert (answer.status_code, answer.json()["succeeded"]) == (200, 2), answer.text
        meeting = {"meets_after": TURNS, "members": SESSIONS}
        pending = [made.begin(number, LOOP if number % 2 else CUT_LOOP, **meeting) for number in range(SESSIONS)]
        served = await made.in_the_middle(len(pending))
        report = await made.manager.abort(pending, budget=BUDGET)
        rollouts = [task.result() for task in pending]
        async with asyncio.timeout(PATIENCE_S):
            while any(each["in_flight"] for each in (await made.standing()).values()):
                await asyncio.sleep(0.1)
        gate = await made.sessions.gate().report(deadline_s=PATIENCE_S)
        numbers = range(SESSIONS, SESSIONS + 2)
        after = await asyncio.gather(*(made.begin(number, SHORT) for number in numbers))
        left = await made.sessions.sessions()
    file = read_file(tmp_path / "s.db")
    aborted = [turn for rollout in rollouts for turn in rollout.session["turns"] if turn["end"] == TurnEnd.DRAINED]

    assert report.problems == ()
    assert served == {*workers.values()}
    assert {rollout.outcome.kind for rollout in rollouts} == {OutcomeKind.DRAINED}, [each.outcome for each in rollouts]
    assert min(len(rollout.session["turns"]) for rollout in rollouts) >= TURNS
    assert aborted
    for rollout in [*rollouts, *after]:
        ledger = rollout.session["ledger"]
        assert rollout.session_id is not None
        assert ledger == ledger_of(file[rollout.session_id])
        assert ledger["generated"] == ledger["masked"] + sum(ledger["dropped"].values()) > 0
    for number, rollout in enumerate(rollouts):
        [sample] = rollout.samples
        dropped = sample.metadata.get("dropped_trailing_turns", 0)
        assert (dropped >= TURNS - 3) if number % 2 == 0 else (dropped == 0), rollout.session["turns"]
    samples = [sample for rollout in rollouts for sample in rollout.samples]
    assert incomplete_inside(tmp_path / "s.db", samples) == []
    assert (str(gate.state), gate.holds, left) == ("open", (), [])
    assert [rollout.outcome.kind for rollout in after] == [OutcomeKind.LIMITED] * 2
    assert [len(rollout.session["turns"]) for rollout in after] == [len(SHORT["steps"])] * 2
    answers = [json.loads((tmp_path / str(number) / "result.json").read_text()) for number in numbers]
    assert answers == [{"answered": len(SHORT["steps"]), "told": ["script_ended"]}] * 2

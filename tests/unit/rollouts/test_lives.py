"""A rollout continues where its agent, sandbox or machine died, and forks from any of its turns."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.engines.scripted import ScriptStep
from harness.rollouts.agents.task import AgentTask, FunctionAgent, ProgramAgent
from harness.rollouts.manager import SessionManager
from harness.samples.rollout import OutcomeKind
from harness.server.serving import RunningServer
from harness.server.store.sqlite import SQLiteStore, list_sessions
from tests.session_servers.scripted import scripted_server
from tests.session_servers.served import says

TALK = """
import json, os, signal, sys, urllib.request

def say(messages):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))["choices"][0]["message"]

messages = [{"role": "user", "content": "go"}]
for number in range(4):
    messages += [say(messages), {"role": "user", "content": f"more {number}"}]
    dies_at = [2, 3, 9][sum(os.path.exists(f"{os.getcwd()}-life-{life}") for life in (1, 2))]
    if number + 1 == dies_at:
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
"""


@asynccontextmanager
async def manager_of(
    *steps: ScriptStep, store: Path | None = None
) -> AsyncIterator[tuple[SessionManager, RunningServer]]:
    """Yield a manager, and its server with sessions in `store`."""
    kept = None if store is None else SQLiteStore(store)
    async with scripted_server(*steps, store=kept) as server, SessionManager(server.url, grace_s=0.3) as manager:
        yield manager, server


def talk(workdir: Path, signal: str, **changes: Any) -> AgentTask:
    """A task of four calls, whose program kills itself in its first two lives."""
    agent = ProgramAgent("talk", (sys.executable, "-S", "-c", TALK, signal))
    return replace(AgentTask(agent, "go", workdir / "0", "scripted", deadline_s=60), **changes)


async def test_a_killed_agent_starts_again_until_it_is_done(tmp_path: Path) -> None:
    """The engine samples each turn once, and one sample has all four."""
    async with manager_of(*says("one", "two", "three", "four"), store=tmp_path / "s.db") as (manager, _):
        rollout = await manager.run(talk(tmp_path, "SIGKILL", resume_attempts=5))
        turns = rollout.session["turns"]

    assert rollout.outcome.kind is OutcomeKind.FINISHED, rollout.outcome
    lives = list_sessions(tmp_path / "s.db")
    assert (len(lives), sum(life.sampled for life in lives.values())) == (3, int(rollout.samples[0].loss_mask.sum()))
    assert [turn["notes"].get("inherited", "") for turn in turns] == ["trained"] * 3 + [""]
    [sample] = rollout.samples
    assert sample.metadata["turns"] == [0, 1, 2, 3]
    ledger = rollout.session["ledger"]
    assert ledger["inherited"] + ledger["generated"] == ledger["trained"] == int(sample.loss_mask.sum())
    assert [(tmp_path / name / "agent.log").is_file() for name in ("0-life-1", "0-life-2", "0")] == [True] * 3


async def test_attempts_are_counted_and_an_agent_that_fails_by_itself_ends(tmp_path: Path) -> None:
    """The last life is the rollout; SIGSEGV is the agent's own."""
    async with manager_of(*says("one", "two", "three", "four"), store=tmp_path / "s.db") as (manager, _):
        once = await manager.run(talk(tmp_path / "a", "SIGKILL", resume_attempts=1))
        own = await manager.run(talk(tmp_path / "b", "SIGSEGV", resume_attempts=1))
        never = await manager.run(talk(tmp_path / "c", "SIGKILL"))

    assert [each.outcome.kind for each in (once, own, never)] == [OutcomeKind.CRASHED] * 3
    assert [len(each.session["turns"]) for each in (once, own, never)] == [3, 2, 2]


async def test_without_a_stored_record_the_last_life_stands(tmp_path: Path) -> None:
    async with manager_of(*says("one", "two")) as (manager, _):
        rollout = await manager.run(talk(tmp_path, "SIGKILL", resume_attempts=3))

    assert rollout.outcome.kind is OutcomeKind.CRASHED
    assert len(rollout.samples) == 1


SLEEPER = """
import os, signal, time
time.sleep(1.5 if os.path.exists(os.getcwd() + "-life-1") else 1.2)
os.kill(os.getpid(), signal.SIGKILL)
"""


async def test_the_deadline_covers_all_lives(tmp_path: Path) -> None:
    """The second is cut short, though it is shorter than the deadline; on a slow machine there may be one alone."""
    async with manager_of(*says("one"), store=tmp_path / "s.db") as (manager, _):
        agent = ProgramAgent("sleeper", (sys.executable, "-S", "-c", SLEEPER))
        task = AgentTask(agent, "go", tmp_path / "0", "scripted", deadline_s=2.0, resume_attempts=50)
        rollout = await manager.run(task)

    lives = len([*tmp_path.glob("0-life-*")]) + 1
    assert lives <= 2
    assert rollout.outcome.kind is OutcomeKind.TIMED_OUT or lives == 1


async def test_forks_share_the_prefix_and_differ_from_the_turn_on(tmp_path: Path) -> None:
    """Their seeds differ, so the forked turn is resampled in each."""
    asked: list[Any] = []

    async def run(base_url: str, prompt: str, request_kwargs: dict[str, Any], metadata: Any, **_: Any) -> Any:
        import httpx

        messages: list[Any] = [{"role": "user", "content": prompt}]
        async with httpx.AsyncClient(trust_env=False) as client:
            for number in range(3):
                body = {"model": "scripted", "messages": messages}
                answer = (await client.post(f"{base_url}/chat/completions", json=body, timeout=30)).json()
                messages += [answer["choices"][0]["message"], {"role": "user", "content": f"more {number}"}]
        asked.append(metadata)
        return {"reward": 1.0}

    session = {"sampling": {"seed": 7}}
    task = AgentTask(FunctionAgent("probe", run), "go", tmp_path / "0", "scripted", session=session)
    async with manager_of(*says("one", "two", "three"), store=tmp_path / "s.db") as (manager, _):
        first = await manager.run(task)
        assert first.session_id is not None
        forks = await manager.fork(first.session_id, task, turn=1, count=3)
        refused = await manager.fork(first.session_id, task, turn=9, count=1)
        resumed = await manager.resume(first.session_id, task)

    assert [each.outcome.kind for each in forks] == [OutcomeKind.FINISHED] * 3
    assert [each.session["turns"][0]["notes"].get("inherited") for each in forks] == ["masked"] * 3
    seeds = {each.session["turns"][1]["sampling"]["used"]["seed"] for each in (first, *forks)}
    assert len(seeds) == 4
    origin = {"session_id": first.session_id, "turn": 1}
    assert [each.samples[0].metadata["forked_from"] for each in forks] == [origin] * 3
    trained = [int(each.samples[0].loss_mask.sum()) for each in forks]
    assert trained == [each.session["ledger"]["generated"] for each in forks]
    assert refused[0].outcome.kind is OutcomeKind.NOT_STARTED
    assert "no turn 9" in refused[0].outcome.detail
    assert resumed.session["ledger"]["generated"] == 0
    assert (resumed.samples[0].tokens == first.samples[0].tokens).all()

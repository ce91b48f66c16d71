"""A cluster of three raylets on this computer, and what its rollouts come to when a node or a controller is lost.

    python -m tests.system.ray.story FOLDER              prints one JSON object
    python -m tests.system.ray.story FOLDER ADDRESS      a controller that shuts every gate and waits to be killed

A program of its own: Ray's processes, threads and warnings are not those of a test.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from harness.adapters.ray.node import NodeSetup
from harness.adapters.ray.rollouts import NodeRollout, RayRollouts
from harness.errors import AdapterError
from harness.rollouts.agents.task import AgentTask, FunctionAgent
from harness.rollouts.client.connections import SessionServerAddress
from harness.rollouts.client.gate import GateClient
from harness.rollouts.client.session_server import SessionServerClient
from harness.rollouts.control.abort import abort_rollout
from harness.rollouts.control.abort_report import AbortBudget
from harness.rollouts.control.pause import paused_rollout

HOST = "127.0.0.2"
"""Loopback; Ray takes 127.0.0.1 for the name of a machine that others can reach."""
NODE = {"node_ip_address": HOST, "object_store_memory": 80_000_000, "include_dashboard": False}
TTL_S = 8.0
"""How long the gates of a controller that was killed stay shut."""
TURNS = 5
TOKEN = "sekret"


def connect(address: str) -> None:
    """To the cluster, in the namespace of nobody."""
    ray.init(address=address, _node_ip_address=HOST, log_to_driver=False, logging_level="ERROR")


def setup(folder: Path, tokenizer: str = "model") -> NodeSetup:
    """Of every node."""
    store = str(folder / "{node}.db")
    return NodeSetup("scripted", str(folder / tokenizer), TOKEN, store, script=str(folder / "script.toml"))


def agent_of(turns: int, waits_for: str) -> FunctionAgent:
    """So many turns, all but the first once a file is there; made here: nodes get the function and no module.

    A file with the session's id in its name appears beside that one before the second call.
    """

    async def run(base_url: str, prompt: str, api_key: str, session_id: str, **_more: Any) -> dict[str, Any]:
        import httpx

        messages: list[dict[str, str]] = [{"role": "user", "content": prompt}]
        headers, statuses, times = {"authorization": f"Bearer {api_key}"}, [], []
        async with httpx.AsyncClient(base_url=base_url, headers=headers, trust_env=False, timeout=120) as client:
            for turn in range(turns):
                while turn and waits_for and not Path(waits_for).exists():
                    await asyncio.sleep(0.05)
                asked = time.time()
                if turn and waits_for:
                    Path(f"{waits_for}-{session_id}").touch()
                answer = await client.post("/chat/completions", json={"messages": messages})
                times.append((asked, time.time()))
                statuses.append(answer.status_code)
                if answer.status_code != 200:
                    break
                messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "Go on."}]
        return {"statuses": statuses, "times": times}

    return FunctionAgent("talker", run)


def tasks(folder: Path, count: int, turns: int = TURNS, waits_for: Path | str = "") -> list[AgentTask]:
    """That many rollouts."""
    return [
        AgentTask(
            agent_of(turns, str(waits_for)), "Tell.", folder / f"work-{time.time_ns()}-{i}", "policy", deadline_s=120
        )
        for i in range(count)
    ]


def told(made: NodeRollout) -> dict[str, Any]:
    """What a test looks at; samples are fetched where there are some."""
    ledger = made.rollout.session["ledger"]
    samples = () if made.samples is None else ray.get(made.samples)
    result = made.rollout.agent_result or {}
    return {
        "outcome": made.rollout.outcome.kind,
        "detail": made.rollout.outcome.detail,
        "statuses": result.get("statuses", []),
        "times": result.get("times", []),
        "samples": len(samples),
        "tokens": sum(int(sample.loss_mask.sum()) for sample in samples),
        "trained": ledger["trained"],
        "inherited": ledger.get("inherited", 0),
        "unaccounted": ledger["generated"]
        + ledger.get("inherited", 0)
        - ledger["trained"]
        - ledger["masked"]
        - sum(ledger["dropped"].values()),
    }


async def gates(servers: Sequence[SessionServerAddress]) -> list[str]:
    """How the gate of each node stands."""
    states = []
    for address in servers:
        async with SessionServerClient(address) as client:
            states.append(str((await GateClient.report(client.gate(), deadline_s=10)).state))
    return states


async def turns_of(rollouts: RayRollouts) -> list[int]:
    """Turns of each session, on all nodes."""
    turns = []
    for address in rollouts.session_servers:
        async with SessionServerClient(address) as client:
            turns += [each.turns for each in await client.sessions()]
    return turns


async def wait_for(rollouts: RayRollouts, sessions: int) -> None:
    """Until there are so many, each with a turn at least; or none, when their rollouts have ended."""
    async with asyncio.timeout(60):
        while len(turns := await turns_of(rollouts)) != sessions or not all(turns):
            await asyncio.sleep(0.05)


async def shut_for_ever(folder: Path) -> None:
    """The controller that is killed."""
    async with RayRollouts(setup(folder)) as rollouts:
        running = [asyncio.create_task(rollouts.run(task)) for task in tasks(folder, 3, waits_for=folder / "died")]
        await wait_for(rollouts, 3)
        async with paused_rollout(rollouts.session_servers, budget=AbortBudget(hold_ttl_s=TTL_S)):
            print("shut", *await gates(rollouts.session_servers), flush=True)
            await asyncio.wait(running)
            await asyncio.sleep(600)


class Stumbles(RayRollouts):
    """Meets something of Ray's at its second node."""

    def _find(self, described: Any) -> Any:
        found, self.found = getattr(self, "found", 0), getattr(self, "found", 0) + 1
        if found:
            raise RuntimeError("no second one")
        return super()._find(described)


async def play(folder: Path, cluster: Cluster, nodes: list[Any]) -> dict[str, Any]:
    """Everything, one after the other."""
    story: dict[str, Any] = {}
    try:
        async with RayRollouts(setup(folder, "no-model")):
            pass
    except AdapterError as error:
        story["refused"] = error.message
    story["left_by_refused"] = len(ray.util.list_named_actors(all_namespaces=True))
    try:
        async with Stumbles(setup(folder)):
            pass
    except RuntimeError as error:
        story["stumbled"] = str(error)
    story["left_by_stumbling"] = len(ray.util.list_named_actors(all_namespaces=True))

    dead = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.system.ray.story", str(folder), cluster.address),
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert dead.stdout is not None
    async with asyncio.timeout(120):
        while not (line := await dead.stdout.readline()).startswith(b"shut "):  # logs come before
            assert line, "the controller ended by itself"
    os.killpg(dead.pid, signal.SIGKILL)
    story["gates_of_the_dead"] = line.decode().split()[1:]
    (folder / "died").touch()
    await dead.wait()
    async with RayRollouts(setup(folder)) as rollouts:
        await wait_for(rollouts, 0)
        story["after_the_dead"] = [told(await each) for each in [rollouts.run(task) for task in tasks(folder, 3)]]
        story["gates_then"] = await gates(rollouts.session_servers)

        try:
            async with RayRollouts(setup(folder, "no-model")):
                pass
        except AdapterError as error:
            story["second_controller"] = error.message

        each_node_has_both = [
            replace(task, resume_attempts=int(n < 3))
            for n, task in enumerate(tasks(folder, 6, waits_for=folder / "shut"))
        ]
        running = [asyncio.create_task(rollouts.run(task)) for task in each_node_has_both]
        await wait_for(rollouts, 6)
        async with paused_rollout(rollouts.session_servers, budget=AbortBudget(drain_s=5, resume_s=5)):
            shut = time.time()
            (folder / "shut").touch()
            async with asyncio.timeout(60):
                while len([*folder.glob("shut-*")]) < len(running):
                    await asyncio.sleep(0.05)
            cluster.remove_node(nodes[0], allow_graceful=False)
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            story["shut"] = [shut, time.time()]
        story["after_the_loss"] = [told(made) for made in await asyncio.gather(*running)]
        story["gates_left"] = await gates(rollouts.session_servers)
        story["on_the_others"] = [told(made) for made in await asyncio.gather(*map(rollouts.run, tasks(folder, 4)))]

        endless = [asyncio.create_task(rollouts.run(task)) for task in tasks(folder, 4, turns=10_000)]
        await wait_for(rollouts, 4)
        report = await abort_rollout(
            endless, session_servers=rollouts.session_servers, agent_hooks=rollouts.abort_hooks()
        )
        story["aborted"] = [told(made) for made in report.results]
        story["abort_problems"] = [str(each) for each in report.problems]
        cancelled = asyncio.create_task(rollouts.run(*tasks(folder, 1, turns=10_000)))
        await wait_for(rollouts, 1)
        cancelled.cancel()
        await asyncio.wait({cancelled})
        story["cancelled"] = cancelled.cancelled()
        await wait_for(rollouts, 0)
        story["gates_at_last"] = await gates(rollouts.session_servers)
    story["left_at_last"] = len(ray.util.list_named_actors(all_namespaces=True))
    return story


def main() -> None:
    """One of the two."""
    folder = Path(sys.argv[1])
    if len(sys.argv) > 2:
        connect(sys.argv[2])
        asyncio.run(shut_for_ever(folder))
        return
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0})
    try:
        nodes = [cluster.add_node(**NODE, num_cpus=1) for _ in range(3)]
        connect(cluster.address)
        print(json.dumps(asyncio.run(play(folder, cluster, nodes))))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()

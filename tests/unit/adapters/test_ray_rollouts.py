"""A node is started once, however many ask; a rollout whose result is lost has an outcome. Without a cluster."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from harness.adapters.ray.node import LostLife, NodeSetup, RolloutNode
from harness.adapters.ray.rollouts import RayRollouts, _Node
from harness.errors import TokenizerError
from harness.rollouts.agents.task import AgentTask, FunctionAgent
from harness.rollouts.client.connections import SessionServerAddress
from harness.samples.rollout import OutcomeKind
from tests.toy_model import write_toy_model


@pytest.fixture(name="setup")
def _setup(tmp_path: Path) -> NodeSetup:
    """On the scripted engine."""
    write_toy_model(tmp_path / "model")
    (tmp_path / "script.toml").write_text('[[steps]]\ntext = "yes"\n')
    return NodeSetup("scripted", str(tmp_path / "model"), "sekret", script=str(tmp_path / "script.toml"))


async def is_up(address: SessionServerAddress) -> bool:
    try:
        async with aiohttp.ClientSession() as http, http.get(f"{address.url}/health"):
            return True
    except aiohttp.ClientConnectionError:
        return False


async def test_controllers_that_start_a_node_at_once_get_one_server(setup: NodeSetup) -> None:
    """One of them goes meanwhile, as a controller that was killed; no sandboxes are left behind by the end."""
    node = RolloutNode(setup)
    gone, *others = [asyncio.create_task(node.start(setup, "127.0.0.1")) for _ in range(3)]
    await asyncio.sleep(0)
    gone.cancel()
    first, second = await asyncio.gather(*others)

    assert first == second == await node.start(setup, "127.0.0.1")
    assert await is_up(first)
    await node.stop()
    assert not await is_up(first)
    await node.stop()


async def test_a_start_that_fails_is_tried_again_and_one_that_is_stopped_leaves_nothing(setup: NodeSetup) -> None:
    tokenizer = Path(setup.tokenizer)
    away = tokenizer.rename(tokenizer.with_name("away"))
    node = RolloutNode(setup)
    with pytest.raises(TokenizerError):
        await node.start(setup, "127.0.0.1")
    away.rename(tokenizer)
    address = await node.start(setup, "127.0.0.1")
    await node.stop()

    starting = asyncio.create_task(node.start(setup, "127.0.0.1"))
    await asyncio.sleep(0)
    await node.stop()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not await is_up(address)


async def test_a_result_that_is_lost_costs_its_rollout_and_not_the_node(setup: NodeSetup, tmp_path: Path) -> None:
    """As when the object store that held it is gone, and the actor is there."""
    from ray.exceptions import OwnerDiedError

    async def lose() -> None:
        raise OwnerDiedError("00" * 28, None, "")

    call = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: (lose(), None)))
    described = {"NodeID": "node7", "NodeManagerAddress": "127.0.0.1"}
    rollouts = RayRollouts(setup)
    rollouts._nodes = [_Node(described, SimpleNamespace(run=call), setup, is_ours=True)]

    async def agent(**_given: Any) -> None:
        pass

    made = await rollouts.run(AgentTask(FunctionAgent("a", agent), "Do it.", tmp_path, "policy"))

    assert (made.rollout.outcome.kind, made.samples) == (OutcomeKind.HARNESS_FAILED, None)
    assert made.rollout.outcome.detail == "its result was lost on node node7"
    assert not rollouts._nodes[0].is_lost


async def test_a_rollout_begins_anew_if_only_the_lost_node_had_its_record(setup: NodeSetup, tmp_path: Path) -> None:
    """What its first life left on a shared disk does not stand in its way."""

    async def agent(base_url: str, api_key: str, **_given: Any) -> dict[str, Any]:
        headers, body = {"authorization": f"Bearer {api_key}"}, {"messages": [{"role": "user", "content": "Do it."}]}
        async with aiohttp.ClientSession(headers=headers) as http, http.post(f"{base_url}/chat/completions", json=body):
            return {}

    work, node = tmp_path / "work", RolloutNode(setup)
    (work / "left").mkdir(parents=True)
    await node.start(setup, "127.0.0.1")
    task = AgentTask(FunctionAgent("a", agent), "Do it.", work, "policy")
    rollout, samples = await node.run(task, [LostLife(tmp_path / "memory", "0" * 32)])
    await node.stop()

    assert (rollout.outcome.kind, rollout.session["ledger"]["generated"] > 0) == (OutcomeKind.FINISHED, True)
    assert (len(samples), (tmp_path / "work-life-1" / "left").is_dir()) == (1, True)

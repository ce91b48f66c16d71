"""One episode of AReaL: a trajectory, a rejection, or a clear error."""

import asyncio
import sys
from typing import Any

import pytest

from harness.adapters import areal as adapter
from harness.engines.scripted import ScriptedFault, ScriptStep
from harness.errors import AdapterError, SessionServerError
from harness.types import Json
from tests.unit.adapters.miles_runs import MilesRun, miles_run

pytestmark = [pytest.mark.usefixtures("trainers"), pytest.mark.xdist_group("torch")]

STEPS = (ScriptStep(text="One moment."), ScriptStep(text="Done."))
ROW = {"messages": [{"role": "user", "content": "Do it."}], "answer": object(), "agent": {"level": 3}}


async def two_turns(base_url: str, prompt: Any, api_key: str, **_more: Any) -> Json:
    """Two model calls, and a reward of a half."""
    import httpx

    messages = list(prompt)
    headers = {"authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(base_url=base_url, headers=headers, trust_env=False, timeout=60) as client:
        for _ in range(2):
            answer = await client.post("/chat/completions", json={"messages": messages})
            if answer.status_code == 404:
                break
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "Go on."}]
    return {"reward": 0.5, "score": {"tests": 3}, "reason": "3 of 7 pass", "messages": len(messages)}


async def crash(**_given: Any) -> None:
    """An agent with a mistake."""
    raise RuntimeError("no such tool")


async def wants_all(**given: Any) -> Json:
    """The same, and a limit is a surprise."""
    result = await two_turns(**given)
    if result["messages"] < 5:
        raise RuntimeError("the session is over")
    return result


async def unscored(**given: Any) -> Json:
    """The same, and nobody knows what it is worth."""
    await two_turns(**given)
    return {"reward": True}


async def episode(run: MilesRun, agent: Any, *, version: int = 0, row: Json = ROW, **options: Any) -> Any:
    """One, as AReaL runs it."""
    from areal.infra.engines import CountingEngine
    from areal.infra.episodes import run_episode

    workflow = adapter.SessionWorkflow(run.server.url, agent, **options)
    try:
        return await run_episode(workflow, CountingEngine(version), row)
    finally:
        await adapter.close()


async def test_a_trajectory_has_areals_columns_and_the_proximal_ones() -> None:
    """As long as the sequence; the prompt has version -1, logprob 0 and mask 0. The reward is in AReaL's figures."""
    from areal.utils import stats_tracker

    async with miles_run(*STEPS) as run:
        made = await episode(run, two_turns)

    sampled = made["versions"][0] >= 0
    assert made.keys() == {
        *("input_ids", "attention_mask", "loss_mask", "logprobs", "versions", "rewards"),
        *("proximal_logprobs", "proximal_versions", "repeat_terminated"),
    }
    assert {str(column.dtype) for column in made.values()} == {"torch.int32", "torch.float32", "torch.bool"}
    assert 0 < sampled.sum() < len(sampled)
    assert not sampled[0]
    assert (made["loss_mask"][0] == sampled).all()
    assert (made["logprobs"][0][~sampled] == 0).all()
    assert (made["proximal_logprobs"] == made["logprobs"]).all()
    sampled_tokens = float(sampled.sum())
    tokens = {"ledger/generated": sampled_tokens, "ledger/trained": sampled_tokens, "ledger/masked": 0.0}
    scalars = {"reward": 0.5, "score/tests": 3.0, **tokens}
    assert (made["rewards"].tolist(), stats_tracker.scalars) == ([0.5], [scalars])


@pytest.mark.parametrize(("label", "version"), [("default", 7), ("3", 3)])
async def test_areals_own_count_stands_where_the_engines_name_no_version(label: str, version: int) -> None:
    """And nowhere else: a label is the truth about what sampled."""
    async with miles_run(*STEPS) as run:
        run.engine.relabel(label)
        made = await episode(run, two_turns, version=7)

    assert set(made["versions"][0].tolist()) == {-1, version}
    assert made["proximal_versions"].tolist() == made["versions"].tolist()  # no token has met the next policy


async def test_a_rollout_that_is_cut_short_is_rejected() -> None:
    """An agent with a mistake, and one that is stopped at its deadline."""
    hangs = ScriptStep(text="An answer.", fault=ScriptedFault.HANG, fault_after=3)
    async with miles_run(hangs) as run:
        assert await episode(run, crash) is None
        assert await episode(run, two_turns, deadline_s=0.3) is None


async def test_a_workflow_of_ones_own_scores_what_agents_do_not() -> None:
    """Without one, a reward that is no number is an error."""
    async with miles_run(*STEPS) as run:
        with pytest.raises(AdapterError, match="expected a number in `reward` of the agent's result, got True"):
            await episode(run, unscored)

        class Scored(adapter.SessionWorkflow):
            async def score(self, rollout: Any, data: Json) -> float:
                return float(len(rollout.samples[0].metadata["turns"]))

        from areal.api import RolloutWorkflow
        from areal.infra.engines import CountingEngine

        assert issubclass(Scored, RolloutWorkflow)
        made = await Scored(run.server.url, unscored).arun_episode(CountingEngine(), ROW)
        await adapter.close()

    assert made["rewards"].tolist() == [2.0]


async def test_generation_settings_are_the_sessions() -> None:
    """And those that it cannot keep are refused by name."""
    from areal.api import GenerationHyperparameters

    async with miles_run(*STEPS) as run:
        few = GenerationHyperparameters(max_new_tokens=2, greedy=True, stop=["!"])
        made = await episode(run, two_turns, gconfig=few)
        with pytest.raises(AdapterError, match=r"^gconfig.frequency_penalty=0.5 is not supported; expected 0.0"):
            await episode(run, two_turns, gconfig=GenerationHyperparameters(frequency_penalty=0.5))

        for name, value in [("top_p", 0.9), ("top_k", 20)]:
            with pytest.raises(AdapterError, match=rf"^gconfig.{name}={value} is not supported: the loss takes ratios"):
                await episode(run, two_turns, gconfig=GenerationHyperparameters(**{name: value}))

        assert await episode(run, wants_all, gconfig=few) is None

    assert made["loss_mask"].sum() == 2  # of a turn that was cut at its length, which ends the branch


@pytest.mark.parametrize(
    ("agent", "options", "message"),
    [
        ("plain_caht", {}, "^agent: no bundled agent 'plain_caht'"),
        ("no/agent.py", {}, "^agent: no agent script at no/agent.py"),
        ("no_such_module.run", {}, "^agent no_such_module.run: ModuleNotFoundError"),
        (crash, {"agent_env": {"A": "1"}}, "^agent_env: a function has no environment"),
    ],
)
def test_an_agent_that_is_not_there_ends_the_run(agent: Any, options: Json, message: str) -> None:
    """When AReaL makes the workflow; an error in an episode would reject it, and all of them, for ever."""
    with pytest.raises(AdapterError, match=message):
        adapter.SessionWorkflow("http://127.0.0.1:9", agent, **options)


async def test_what_keeps_every_episode_from_running_is_named() -> None:
    """A server that is not there, a row that is no conversation."""
    async with miles_run(*STEPS) as run:
        with pytest.raises(AdapterError, match=r"^data: expected `messages`, got question"):
            await episode(run, two_turns, row={"question": "?"})
    workflow = adapter.SessionWorkflow("http://127.0.0.1:9", two_turns)
    from areal.infra.engines import CountingEngine

    with pytest.raises(SessionServerError, match=r"127\.0\.0\.1:9"):
        await workflow.arun_episode(CountingEngine(), ROW)
    await adapter.close()


async def test_episodes_share_what_they_open_and_areal_ends_it() -> None:
    """However many workflows AReaL makes with the same settings; one connection, closed with AReaL's loop."""
    from areal.infra.engines import CountingEngine
    from areal.infra.utils.concurrent import _cleanups, run_cleanups

    async with miles_run(*STEPS) as run:
        made = await asyncio.gather(
            *(adapter.SessionWorkflow(run.server.url, two_turns).arun_episode(CountingEngine(), ROW) for _ in range(4))
        )
        assert len(_cleanups) == 1
        await run_cleanups()

    assert all(trajectory is not None for trajectory in made)


def test_another_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import areal
    from areal.api import RolloutWorkflow

    async def arun_episode(self: Any, engine: Any, request: Any, session: Any) -> None:
        pass

    monkeypatch.setattr(RolloutWorkflow, "arun_episode", arun_episode)
    monkeypatch.setattr(areal, "__version__", "2.0.0")
    with pytest.raises(
        AdapterError,
        match=r"^areal 2.0.0: RolloutWorkflow.arun_episode takes self, engine, request, session; expected self, ",
    ):
        adapter.SessionWorkflow  # noqa: B018  # asking is what registers it


def test_the_adapter_imports_areal_when_it_is_asked() -> None:
    """Its module can be read without AReaL; a name that it has not is an error as ever."""
    assert "areal" not in sys.modules
    assert not hasattr(adapter, "Workflow")
    assert "areal" not in sys.modules

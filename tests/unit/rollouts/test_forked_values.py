"""Values of turns by forks of real sessions: a game whose every state has a known value, as its policy is known."""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from harness.engines.scripted import Script, ScriptedEngine, ScriptStep
from harness.rollouts.agents.task import AgentTask, FunctionAgent
from harness.rollouts.manager import SessionManager
from harness.samples.credit import value_advantages
from harness.samples.rollout import Rollout
from harness.samples.turn_rewards import value_turns, values_of
from harness.server.serving import serve
from harness.server.store.sqlite import SQLiteStore
from harness.suite.judge.groups import value_of
from harness.types import GenerationDelta, GenerationRequest, GenerationResult
from tests.builders import toy_template
from tests.thoroughness import examples

SEEDS, TURNS, FORKS, WINS, SAYS = max(2, examples(6)), 3, 8, 3, 4
"""A turn wins with a chance of 3 in 4; the reward is the share of won turns."""


class Player(ScriptedEngine):
    """Says `1` or `0` by the seed of the turn alone."""

    def stream(self, request: GenerationRequest) -> AsyncGenerator[GenerationDelta | GenerationResult, None]:
        assert request.session_id is not None
        assert request.params.seed is not None
        self.play_from(request.session_id, request.params.seed % SAYS)
        return super().stream(request)


async def play(base_url: str, prompt: str, request_kwargs: dict[str, Any], metadata: Any, **_: Any) -> Any:
    """Three turns, whatever the model says."""
    import httpx

    messages: list[Any] = [{"role": "user", "content": prompt}]
    async with httpx.AsyncClient(trust_env=False) as client:
        for number in range(TURNS):
            body = {"model": "scripted", "messages": messages}
            answer = (await client.post(f"{base_url}/chat/completions", json=body, timeout=30)).json()
            messages += [answer["choices"][0]["message"], {"role": "user", "content": f"round {number}"}]
    return {}


def won(rollout: Rollout, turns: int = TURNS) -> float:
    """The reward of the first turns."""
    return sum(turn["reply"]["content"] == "1" for turn in rollout.session["turns"][:turns]) / TURNS


async def test_forks_find_the_exact_value_of_95_in_100_turns(tmp_path: Path) -> None:
    """The ledger has each token of a family trained once; differences of values add up to the reward."""
    chat_tokenizer = toy_template()
    script = Script(tuple(ScriptStep(text="1" if number < WINS else "0") for number in range(SAYS)))
    engine = Player(chat_tokenizer.tokenizer, script)
    inside: list[bool] = []
    async with (
        serve(engine, chat_tokenizer, SQLiteStore(tmp_path / "s.db")) as server,
        SessionManager(server.url) as manager,
    ):
        for seed in range(SEEDS):
            session = {"sampling": {"seed": seed}}
            task = AgentTask(FunctionAgent("player", play), "go", tmp_path / str(seed), "scripted", session=session)
            first = await manager.run(task)
            assert first.session_id is not None
            values = {}
            for turn in range(TURNS):
                forks = await manager.fork(first.session_id, task, turn=turn, count=FORKS)
                value = value_of([won(fork) for fork in forks])
                assert value is not None
                values[turn] = value
                exact = won(first, turn) + (TURNS - turn) / TURNS * WINS / SAYS
                inside.append(value.low <= exact <= value.high)
                for ledger in (fork.session["ledger"] for fork in forks):
                    assert ledger["trained"] == ledger["generated"]
                    assert ledger["masked"] == ledger.get("inherited", 0)
            known = values_of(value_turns(first.samples, values))
            [advantages] = value_advantages([[*known.values()]], [won(first)])
            assert abs(advantages.sum() - (won(first) - values[0].mean)) < 1e-6

    assert len(inside) == SEEDS * TURNS
    assert sum(inside) >= 0.95 * len(inside)

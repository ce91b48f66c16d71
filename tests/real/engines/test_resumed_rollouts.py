"""Rollouts that are killed after each turn continue: a real engine samples each turn once, and its logprobs stay true.

`HARNESS_SOAK_AGENTS` says how many rollouts. The weights change in the middle of their lives.
"""

import asyncio
import os
from pathlib import Path

import pytest

from harness.engines.base import EngineCount, TokenProvider
from harness.engines.connect import open_engine
from harness.lab.lanes import INSTALLED, LaneEngine
from harness.lab.models.weight_files import perturb_checkpoint
from harness.rollouts.control.weights import WeightUpdater
from harness.suite.judge.witness import Look, hear
from harness.tokens.model_family import open_chat_tokenizer
from harness.types import Json, Message
from tests.builders import user
from tests.controllers.weight_agents import versions_of
from tests.ground_truth import compare
from tests.real_engines import on_real
from tests.session_servers.served import Client, Served, serving_with

ROLLOUTS = int(os.environ.get("HARNESS_SOAK_AGENTS", "10"))
TURNS = 4
UPDATED = 2
"""Life before which the weights change."""
ASKED = {"max_tokens": 60, "temperature": 0.7, "stop": [".", ",", "\n"]}
TOLERANCE = 1e-3
COUNTED_S = 60


class KilledAgent:
    """An agent that asks in each life what it asked in the last one, and then once more."""

    def __init__(self, client: Client[TokenProvider], number: int) -> None:
        self.client = client
        self.number = number
        self.session: Served | None = None
        self.answers: list[Message] = []
        self.ledgers: list[Json] = []
        self.repeated = 0
        self.has_ended = False
        """True after an answer that was cut at its limit: its branch cannot continue."""

    async def begin(self) -> None:
        """End the session of the last life, and repeat its calls on the next one."""
        inherits: Json = {}
        if self.session is not None:
            (await self.client.http.delete(f"/sessions/{self.session.session_id}")).raise_for_status()
            inherits = {"inherits": {"session_id": self.session.session_id}}
        self.session = await self.client.create(sampling={"seed": self.number}, **inherits)
        known, self.answers, self.has_ended = self.answers, [], False
        for _ in known:
            await self.ask()
        assert self.answers == known
        self.repeated += len(known)

    async def ask(self) -> None:
        """Make the next call of the conversation."""
        if self.session is None or self.has_ended:
            return
        said = [user(f"Tell story number {self.number}, about a lighthouse and a storm.")]
        for answer in self.answers:
            said += [answer, user("And then?")]
        answer = await self.client.chat(self.session, said, **ASKED)
        answer.raise_for_status()
        [choice] = answer.json()["choices"]
        self.answers.append(choice["message"])
        self.has_ended = choice["finish_reason"] == "length"

    async def note(self) -> Json:
        """Note the ledger of this life; return the record."""
        assert self.session is not None
        record = await self.client.record(self.session)
        self.ledgers.append(record["ledger"])
        return record

    @property
    def generated(self) -> int:
        """Tokens sampled in all lives."""
        return sum(ledger["generated"] for ledger in self.ledgers)


async def settle(engine: TokenProvider, before: EngineCount, generated: int) -> EngineCount:
    """Return the engine's counters once they hold all its requests: exactly `generated` tokens more than `before`."""
    async with asyncio.timeout(COUNTED_S):
        while True:
            now = await engine.count_sampled()
            reading = hear(now.engine, Look({"": before}, 0, 0), Look({"": now}, generated, 0))
            if not reading.may_change:
                assert reading.agrees, reading
                return now
            await asyncio.sleep(0.1)


async def play(agents: list[KilledAgent], engine: TokenProvider, checkpoints: dict[int, Path]) -> None:
    """Let all agents live `TURNS + 1` lives; the last one asks for nothing new."""
    first = counted = await engine.count_sampled()
    for life in range(TURNS + 1):
        if life == UPDATED:
            async with WeightUpdater([engine], [agents[0].client.url]).update(1) as update:
                await update.apply(checkpoints[1])
            counted = await engine.count_sampled()
        await asyncio.gather(*(agent.begin() for agent in agents))
        assert await engine.count_sampled() == counted  # neither a token nor a request
        if life < TURNS:
            await asyncio.gather(*(agent.ask() for agent in agents))
        for agent in agents:
            await agent.note()
        counted = await settle(engine, first, sum(agent.generated for agent in agents))


@pytest.mark.timeout(1200 + 20 * ROLLOUTS)
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=on_real(kind)) for kind in INSTALLED])
async def test_no_turn_is_sampled_twice(
    kind: LaneEngine, request: pytest.FixtureRequest, model_dir: Path, tmp_path: Path
) -> None:
    """The engine counts no request for an inherited turn; its tokens have the logprobs of their version's weights."""
    url, chat_tokenizer = request.getfixturevalue(f"{kind}_url"), open_chat_tokenizer(model_dir)
    checkpoints = {0: model_dir, 1: perturb_checkpoint(model_dir, tmp_path / "1", number=1, noise=0.03)}
    engine = open_engine(f"{kind}={url}", tokenizer=chat_tokenizer.tokenizer)
    serving = serving_with(engine, store=tmp_path / "s.db", chat_tokenizer=chat_tokenizer, patience_s=600)
    async with serving as client:
        await engine.update_weights(model_dir, "0")
        try:
            agents = [KilledAgent(client, number) for number in range(ROLLOUTS)]
            await play(agents, engine, checkpoints)
            samples = [sample for agent in agents if agent.session for sample in await client.samples(agent.session)]
        finally:
            await engine.update_weights(model_dir, "0")
    truth = await asyncio.to_thread(compare, samples, checkpoints)
    repeated = sum(agent.repeated for agent in agents)
    print(f"{len(agents)} rollouts, {repeated} inherited turns", *truth.lines(), sep="\n")

    assert len(samples) == len(agents)
    for agent, sample in zip(agents, samples, strict=True):
        last = agent.ledgers[-1]
        assert last["generated"] == 0
        assert last["inherited"] == last["trained"] == sum(sample["loss_mask"]) == agent.generated
    assert truth.sampled == sum(agent.generated for agent in agents)
    assert set().union(*map(versions_of, samples)) == {0, 1}
    assert truth.met_next
    assert truth.third_states == []
    assert max(truth.behavior_difference, truth.proximal_difference) < TOLERANCE
    assert truth.moved > 10 * TOLERANCE

"""Random schedules of turns, updates, aborts and sweeps over the real server: every value is the definition's (I7).

With updates that end turns in flight, one version at a time, and a sweep before each, no token misses its next version:
what a request, a continuation or a sweep did not score, another one did. Whatever else happens, nothing is ever wrong.
"""

import asyncio
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import example, given, settings

from harness.engines.base import PauseMode
from harness.engines.scripted import ScriptStep, scripted_logprobs
from harness.rollouts.control.weights import WeightUpdater
from harness.types import as_ids
from tests.builders import user
from tests.session_servers.served import Client, Served, serving

CHECKPOINT = Path("/checkpoint")
STEPS = (
    ScriptStep(text="a longer answer", token_delay_s=0.001),
    ScriptStep(text="short"),
    ScriptStep(text="another", token_delay_s=0.001),
)

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 2)),
        st.tuples(st.just("finish"), st.integers(0, 2)),
        st.tuples(st.just("branch"), st.integers(0, 2)),
        st.tuples(st.just("wait"), st.integers(1, 5)),
        st.tuples(st.just("abort"), st.just(0)),
        st.tuples(st.just("update"), st.just(1)),
        st.tuples(st.just("update"), st.just(1)),
        st.tuples(st.just("sweep"), st.just(0)),
        st.tuples(st.just("pause"), st.just(0)),
    ),
    min_size=4,
    max_size=14,
)


class World:
    """Three agents of one server; each asks for one turn at a time."""

    def __init__(self, client: Client, sessions: list[Served], mode: PauseMode) -> None:
        self.client = client
        self.sessions = sessions
        self.mode = mode
        self.histories: list[list[Any]] = [[user(f"start {number}")] for number in range(len(sessions))]
        self.asking: list[asyncio.Task[None] | None] = [None] * len(sessions)
        self.version = 0

    async def do(self, action: str, argument: int) -> None:
        """One step of the schedule."""
        match action:
            case "ask":
                await self.do("finish", argument)
                self.asking[argument] = asyncio.create_task(self._ask(argument))
            case "finish":
                if (task := self.asking[argument]) is not None:
                    await task
            case "branch":
                await self.do("finish", argument)
                self.histories[argument] = [*self.histories[argument][:-2], user("something else")]
            case "wait":
                await asyncio.sleep(argument / 1000)
            case "abort":
                await self.client.engine.abort(None)
            case "sweep":
                await self.client.http.post("/sessions/sweep", json={"version": self.version})
            case "pause":
                await self.client.http.post("/sessions/pause")
                await self.client.engine.pause(self.mode)
                await self.client.engine.resume()
                await self.client.http.post("/sessions/resume")
            case "update":
                self.version += argument
                # A turn that ends during a sweep is too late for it, and a kept one is scored by nothing else.
                in_flight = any(task is not None and not task.done() for task in self.asking)
                may_miss = self.mode is PauseMode.KEEP and in_flight
                updater = WeightUpdater([self.client.engine], [self.client.url], mode=self.mode)
                async with updater.update(self.version) as update:
                    await update.apply(CHECKPOINT)
                said = [each for each in update.report.problems if not (may_miss and "were not scored" in each)]
                assert said == []

    async def _ask(self, number: int) -> None:
        history = self.histories[number]
        answer = await self.client.chat(self.sessions[number], history)
        if answer.status_code == 200:
            history += [answer.json()["choices"][0]["message"], user("continue")]

    async def samples(self) -> list[Any]:
        """Of all sessions, once everything has ended and been swept."""
        for number in range(len(self.sessions)):
            await self.do("finish", number)
        await self.do("sweep", 0)
        return [sample for session in self.sessions for sample in await self.client.samples(session)]


async def play(actions: list[tuple[str, int]], mode: PauseMode) -> tuple[int, list[Any]]:
    """The version that is live at the end, and all samples."""
    async with serving(*STEPS) as client:
        sessions = [await client.create(selection="leaves") for _ in range(3)]
        world = World(client, sessions, mode)
        for action, argument in actions:
            await world.do(action, argument)
        return world.version, await world.samples()


def unmet(sample: Any) -> set[int]:
    """Behavior versions of tokens without a next version; fails on a value that is not the definition's."""
    tokens, start = as_ids(sample["tokens"]), len(sample["tokens"]) - sample["response_length"]
    behavior, proximal = np.asarray(sample["behavior_versions"]), np.asarray(sample["proximal_versions"])
    is_sampled = behavior >= 0
    assert set((proximal - behavior)[is_sampled].tolist()) <= {0, 1}
    for column, versions in (("rollout_log_probs", behavior), ("proximal_logprobs", proximal)):
        for version in set(versions[is_sampled].tolist()):
            true = scripted_logprobs(tokens, 0, str(version))[start:]
            where = is_sampled & (versions == version)
            assert np.array_equal(np.asarray(sample[column], np.float32)[where], true[where])
    return set(behavior[is_sampled & (proximal == behavior)].tolist())


@given(ACTIONS)
@example([("ask", 0), ("wait", 2), ("update", 1), ("wait", 2), ("update", 1), ("wait", 2), ("update", 1)])
@example([("ask", 0), ("ask", 1), ("finish", 0), ("update", 1), ("branch", 0), ("ask", 0), ("update", 1), ("ask", 1)])
@settings(max_examples=25, deadline=None)
def test_no_token_misses_its_next_version(actions):
    """Turns in flight end with each update: only what the live version sampled still waits at the end."""
    version, samples = asyncio.run(play(actions, PauseMode.ABORT))

    for sample in samples:
        assert unmet(sample) <= {version}


@given(ACTIONS.map(lambda actions: [(what, 2 if what == "update" and how else how) for what, how in actions]))
@settings(max_examples=10, deadline=None)
def test_versions_that_were_skipped_are_met_by_nobody(actions):
    """Updates by two: no token ever holds another version than its own, and its values are its own."""
    _, samples = asyncio.run(play(actions, PauseMode.ABORT))

    for sample in samples:
        unmet(sample)
        assert sample["proximal_versions"] == sample["behavior_versions"]


@given(ACTIONS)
@settings(max_examples=10, deadline=None)
def test_frozen_turns_are_never_given_a_wrong_value(actions):
    """Kept requests may miss a version; what they hold is the definition's all the same."""
    _, samples = asyncio.run(play(actions, PauseMode.KEEP))

    for sample in samples:
        unmet(sample)

"""Rewards of turns on their way through a step: onto tokens of segments, into its record, and out of it again."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.rollouts.agents.task import AgentTask, FunctionAgent
from harness.samples.credit import turn_advantages
from harness.samples.rollout import Outcome, OutcomeKind, Rollout
from harness.samples.segments import TooLong
from harness.samples.turn_rewards import RolloutReward
from harness.sessions.ledger import Ledger
from harness.training.collector.groups import GroupIndex, RolloutIndex, ScoredRollout, credit_turns
from harness.training.collector.pipeline import StepPipeline
from harness.training.collector.record.step_ledger import book_rollout
from harness.training.collector.record.step_record import StepRecord, from_bytes, pack_again, to_bytes
from harness.training.collector.rollout_source import SessionSource
from harness.training.collector.segment_maker import SegmentMaker, Stale
from harness.training.collector.step_rules import StepBudget, StepRules
from harness.training.learner.learner import ScriptedLearner
from harness.types import Json, Sample, as_ids, as_logprobs
from tests.builders import sample
from tests.collector.training import Field, playing

INDEX = RolloutIndex(GroupIndex(0, 0), 0)
MEMBERS, OUTPUT = 3, 4


def scored(*samples: Sample, reward: float = 1.0, member: int = 0) -> ScoredRollout:
    """A rollout of these samples, as it is handed over."""
    rollout = Rollout("s", Outcome(OutcomeKind.FINISHED, None), samples, {"turns": []}, None, 1.0)
    return ScoredRollout(replace(INDEX, member=member), rollout, reward)


def conversation(*versions: int, turns: int = 0) -> Sample:
    """Two tokens of prompt, and a turn of four tokens that each of `versions` sampled; one of context between."""
    spans = [[place * (OUTPUT + 1), place * (OUTPUT + 1) + OUTPUT] for place in range(len(versions))]
    column = np.full(spans[-1][1], -1, np.int32)
    for version, (start, end) in zip(versions, spans, strict=True):
        column[start:end] = version
    logprobs = as_logprobs(np.where(column >= 0, -0.5, 0.0))
    return sample(
        tokens=as_ids(range(2 + column.size)),
        response_length=column.size,
        loss_mask=(column >= 0).astype(np.uint8),
        rollout_log_probs=logprobs,
        behavior_versions=as_ids(column),
        proximal_logprobs=logprobs,
        proximal_versions=as_ids(column),
        metadata={"turns": list(range(turns, turns + len(versions))), "spans": spans},
    )


def test_each_token_has_the_advantage_of_its_turn():
    """0 on context, whatever stands in the mask."""
    [made] = SegmentMaker(100).make(scored(conversation(0, 0)), (0.5, -2.0), version=0)
    assert made.segment is not None
    assert made.segment.advantages.tolist() == [0.0] * 2 + [0.5] * 4 + [0.0] + [-2.0] * 4
    assert made.facts.advantage == (0.5, -2.0)


def test_turns_of_several_samples_are_counted_over_the_whole_rollout():
    """The third advantage is that of the second sample's only turn."""
    made = list(
        SegmentMaker(100).make(scored(conversation(0, 0), conversation(0, turns=2)), (1.0, 2.0, 3.0), version=0)
    )
    assert [sorted(set(each.segment.advantages.tolist())) for each in made if each.segment] == [[0, 1, 2], [0, 3]]


def test_credit_of_a_group_knows_rollouts_that_train_nothing():
    """They count with their reward; one alone has nothing to be compared with."""
    group = [scored(conversation(0, 0), reward=2.0), scored(reward=1.0, member=1)]
    assert credit_turns(turn_advantages, group) == [(1.0, 2.0), (-1.0,)]
    assert credit_turns(turn_advantages, group[:1]) == [(0.0, 0.0)]
    assert not list(SegmentMaker(100).make(group[1], (-1.0,), version=0))


def test_stale_tokens_are_masked_and_the_others_trained():
    """Of the four turns the first two are too old; `drop` leaves the whole sample out."""
    rollout = scored(conversation(0, 1, 2, 3))
    [made] = SegmentMaker(100, max_staleness=1).make(rollout, 1.0, version=3)
    assert made.segment is not None
    assert made.segment.loss_mask.tolist() == [0] * 12 + [1] * 4 + [0] + [1] * 4
    assert made.segment.ids.size == rollout.rollout.samples[0].tokens.size
    assert (made.facts.trained, made.facts.masked, dict(made.facts.dropped)) == (8, 0, {"stale": 8})
    [dropped] = SegmentMaker(100, max_staleness=1, staleness=Stale.DROP).make(rollout, 1.0, version=3)
    assert (dropped.segment, dropped.facts.reason, dict(dropped.facts.dropped)) == (None, "stale", {"stale": 16})


@pytest.mark.parametrize("staleness", [*Stale])
def test_a_sample_that_is_too_old_as_a_whole_is_dropped(staleness: Stale):
    """Nothing of it would be trained."""
    [made] = SegmentMaker(100, staleness=staleness).make(scored(conversation(0, 1)), 1.0, version=2)
    assert (made.segment, made.facts.reason, dict(made.facts.dropped)) == (None, "stale", {"stale": 8})


def test_a_segment_that_was_cut_behind_its_old_tokens_is_dropped():
    """What a pack holds of it is stale, what it does not hold is too long."""
    maker = SegmentMaker(7, too_long=TooLong.CUT, max_staleness=1)
    [made] = maker.make(scored(conversation(0, 2)), 1.0, version=2)
    assert (made.segment, made.facts.reason) == (None, "stale")
    assert dict(made.facts.dropped) == {"too_long": 4, "stale": 4}


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 3),
    st.sampled_from([*Stale]),
    st.integers(3, 30),
)
def test_no_token_is_lost_whatever_is_stale(versions: list[list[int]], most: int, staleness: Stale, length: int):
    """The books of a rollout balance, and a segment trains nothing that is too old."""
    starts = np.cumsum([0, *map(len, versions)])
    samples = [conversation(*each, turns=int(start)) for each, start in zip(versions, starts, strict=False)]
    maker = SegmentMaker(length, too_long=TooLong.CUT, max_staleness=most, staleness=staleness)
    made = list(maker.make(scored(*samples), 1.0, version=3))
    sampled = OUTPUT * sum(map(len, versions))
    ledger = book_rollout(Ledger(sampled, sampled), [each.facts for each in made], "a rollout")
    assert ledger.trained == sum(each.segment.trained_tokens for each in made if each.segment)
    for each in made:
        if each.segment is not None:
            assert each.segment.trained_tokens
            assert (3 - each.segment.behavior_versions[each.segment.loss_mask == 1] <= most).all()


def source_of(field: Field, rewards: Mapping[int, Mapping[int | str, float | None]]) -> SessionSource:
    """Rollouts of three turns; by member, what its turns have earned of a reward of 1."""

    def task_of(index: RolloutIndex) -> AgentTask:
        place = field.directory / re.sub(r"\W+", "-", str(index))
        return AgentTask(FunctionAgent("play", field._play, {"index": index}), "Question", place, "m", deadline_s=60)

    async def reward_of(index: RolloutIndex, rollout: Rollout) -> RolloutReward:
        assert len(rollout.session["turns"]) == MEMBERS
        return RolloutReward(1.0, rewards[index.member], {"tests": 3.0}, "3 of 7 pass")

    return SessionSource(field.manager, task_of, reward_of)


async def test_a_step_trains_by_turns_and_is_packed_again(tmp_path: Path):
    """The middle turn of one rollout earned all; its other turns earned nothing of their own."""
    kept: list[ScoredRollout] = []

    class Keeping(SessionSource):
        """Keeps what it hands out, as a run does."""

        async def run(self, index: RolloutIndex, resumes: str | None = None) -> ScoredRollout:
            """As said."""
            kept.append(from_bytes(to_bytes(await super().run(index, resumes))))
            return kept[-1]

    async with playing(tmp_path) as field:
        field.turns = lambda _: MEMBERS
        source = source_of(field, {0: {1: 1.0}, 1: {2: 1.0}, 2: {}})
        source.__class__ = Keeping
        maker = SegmentMaker(packing_length=4000)
        rules = StepRules(StepBudget(3, 3))
        async with StepPipeline(source, rules, ScriptedLearner(), maker, credit=turn_advantages) as pipeline:
            step = await pipeline.run(0, version=0)
    by_member = {each.rollout.member: each.advantage for each in step.packed.samples}
    assert by_member == {0: (0.0, 0.0, -1.0), 1: (0.0, 0.0, 0.5), 2: (0.0, 0.0, 0.5)}
    first = next(each.rollout.samples[0] for each in kept if each.index.member == 0)
    assert first.turn_rewards == (None, 1.0, None)
    assert first.metadata["score"] == {"figures": {"tests": 3.0}, "reason": "3 of 7 pass"}
    starts = [start for start, _ in first.metadata["spans"]]
    assert first.returns[starts].tolist() == [1.0, 1.0, 0.0]
    record = StepRecord.read(StepRecord.of(step.packed, 0, Ledger()).to_line())
    assert [pack.digest() for pack in pack_again(record, kept, maker)] == [each.digest for each in step.packed.packs]


async def test_a_reward_of_a_turn_that_is_not_there_costs_the_rollout_its_reward(tmp_path: Path):
    """By the turn's name; it is never a zero."""
    async with playing(tmp_path) as field:
        field.turns = lambda _: MEMBERS
        found = await source_of(field, {0: {5: 1.0}}).run(INDEX)
    assert found.reward is None
    assert "turn_rewards[5]: expected the index of a turn, 0 to 2" in found.error


async def test_samples_are_collected_with_the_rewards_of_turns(tmp_path: Path):
    """`collect(turn_rewards=...)` stamps what it reads."""
    async with playing(tmp_path) as field:
        session: Json = (await field.http.post(f"{field.server.url}/sessions", json={})).json()
        headers = {"authorization": f"Bearer {session['api_key']}"}
        for text in ("one", "two"):
            messages = [{"role": "user", "content": text}]
            url = f"{session['base_url']}/v1/chat/completions"
            answer = await field.http.post(url, json={"model": "m", "messages": messages}, headers=headers)
            assert answer.status_code == 200
        collected = await field.manager._client.collect(session["session_id"], turn_rewards={"0": 1.0, 1: 0.5})
    assert [each.turn_rewards for each in collected.samples] == [(1.0,), (0.5,)]
    assert [set(each.returns.tolist()) for each in collected.samples] == [{1.5}, {0.5}]

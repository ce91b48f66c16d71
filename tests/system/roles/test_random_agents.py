"""Every policy token of any agent is trained exactly once, and no other token is (I13)."""

import os
from collections import Counter

import pytest

from harness.samples.delivery import TRAINED_ROLES, turn_spans
from harness.samples.segments import TooLong
from harness.sessions.session import Session
from harness.training.collector.segment_maker import SegmentMaker
from harness.types import Json
from tests.collector.test_segment_maker import rollout_of
from tests.session_servers.served import serving
from tests.system.roles.random_agents import plan, play, roles_of, steps_of

AGENTS = int(os.environ.get("HARNESS_SOAK_AGENTS", "100"))
GROUPS = 10


@pytest.mark.parametrize("group", range(GROUPS))
async def test_policy_tokens_of_random_agents_are_trained_exactly_once(group: int):
    """Whatever the agent does, and wherever it is drained; an oracle knows the role of each call."""
    for seed in range(group, AGENTS, GROUPS):
        calls = plan(seed)
        async with serving(*steps_of(calls)) as client:
            session = await client.create()
            await play(client, session, seed, calls)
            record, samples = await client.record(session), await client.samples(session)
            check_collector(client.server.sessions.in_memory(session.session_id), count_trained(samples))
        live = [turn for turn in record["turns"] if turn["output_length"]]
        expected = dict(enumerate(roles_of(calls)))
        found = {turn["turn"]: (turn["role"], turn["evidence"]) for turn in live}
        wrong = {turn: (expected[turn], *why) for turn, why in found.items() if expected[turn] != why[0]}
        assert not wrong, (seed, wrong)
        trained = count_trained(samples)
        policy = {turn["turn"] for turn in live if expected[turn["turn"]] in TRAINED_ROLES}
        assert trained == Counter(
            {(turn["turn"], i): 1 for turn in live if turn["turn"] in policy for i in range(turn["output_length"])}
        ), seed
        ledger = record["ledger"]
        assert ledger["trained"] == len(trained)
        assert ledger["generated"] == ledger["trained"] + ledger["masked"] + sum(ledger["dropped"].values())
        assert not samples or sum(sample["weight"] for sample in samples) == pytest.approx(1.0)


def check_collector(session: Session | None, trained: Counter[tuple[int, int]]) -> None:
    """What a step trains of the session is `trained`; of samples that do not fit, it trains or names each token."""
    assert session is not None
    scored = rollout_of(session)
    sizes = sorted(sample.tokens.size for sample in scored.rollout.samples)
    for length in {10**6, *sizes[len(sizes) // 2 :]}:
        made = list(SegmentMaker(length, too_long=TooLong.DROP).make(scored, 1.0, version=0))
        found: Counter[tuple[int, int]] = Counter()
        for each in made:
            if each.segment is not None:
                sample = scored.rollout.samples[each.facts.sample]
                mask = each.segment.loss_mask[sample.tokens.size - sample.response_length :]
                found.update((turn, i) for turn, span in turn_spans(sample) for i, bit in enumerate(mask[span]) if bit)
        accounts = [each.facts for each in made]
        assert max(found.values(), default=1) == 1
        assert sum(each.trained for each in accounts) == len(found)
        ledger = session.ledger()
        assert sum(each.trained + each.masked + sum(each.dropped.values()) for each in accounts) == (
            ledger.trained + ledger.masked
        )
        assert found == trained if length >= max(sizes, default=0) else found.keys() <= trained.keys()


def count_trained(samples: list[Json]) -> Counter[tuple[int, int]]:
    """How often each token, by turn and place in it, has mask 1; nothing outside of turns has."""
    trained: Counter[tuple[int, int]] = Counter()
    for sample in samples:
        inside = 0
        for turn, (start, end) in zip(sample["metadata"]["turns"], sample["metadata"]["spans"], strict=True):
            trained.update((turn, i) for i, mask in enumerate(sample["loss_mask"][start:end]) if mask)
            inside += sum(sample["loss_mask"][start:end])
        assert inside == sum(sample["loss_mask"])
    return trained

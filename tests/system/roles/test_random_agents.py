"""Every policy token of any agent is trained exactly once, and no other token is (I13)."""

from collections import Counter

import pytest

from harness.samples.delivery import TRAINED_ROLES
from harness.types import Json
from tests.session_servers.served import serving
from tests.system.roles.random_agents import plan, play, roles_of, steps_of

AGENTS = 300
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

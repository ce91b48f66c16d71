"""Engines that stand still and take other weights under live tool loops, on the whole chain: no agent notices."""

import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from harness.engines.connect import open_engine
from harness.samples.rollout import OutcomeKind
from harness.tokens.tokenizer import Tokenizer
from harness.types import Json
from tests import ground_truth
from tests.real.chain.suite import SESSIONS, TURNS, play_on_the_chain, prompts
from tests.real.chain.tool_loop import CALL, LONG

pytestmark = pytest.mark.agent

NOISE = 0.03
TOLERANCE = 1e-3
"""See `tests/real/weights/test_real_engines.py`."""


async def test_everything_stands_still_twice(workers: Mapping[str, str], model_dir: Path, tmp_path: Path):
    """In the middle of turns, as for other weights: the engines end them, and they continue as the same turns."""
    first, second = 2, 5
    everybody = [*range(SESSIONS)]
    played = await play_on_the_chain(
        tmp_path,
        model_dir,
        workers,
        script=[CALL, LONG, CALL, CALL, LONG, CALL],
        prompts=prompts(calls=TURNS, meets_after=second - 1, members=SESSIONS),
        faults=[
            {"action": "pause", "at_turn": first, "at_token": 6, "sessions": [0], "seconds": 0.4},
            # All have met between the two, so the first is over.
            {"action": "pause", "at_turn": second, "at_token": 6, "sessions": [0], "seconds": 0.4},
        ],
    )

    assert played.firings == [("pause", "")] * 2
    for number in everybody:
        assert played.answers(number) == {"answered": TURNS, "told": []}
        assert [turn.status for turn in played.sessions[number].turns.values()] == ["completed"] * TURNS
    assert any(len(turn.segments) > 1 for turn in played.turns)


def count_met(sample: Json) -> int:
    """Its tokens that met their next version."""
    columns = zip(sample["behavior_versions"], sample["proximal_versions"], strict=True)
    return sum(behavior >= 0 and proximal == behavior + 1 for behavior, proximal in columns)


@pytest.fixture(name="renewed")
async def _renewed(workers: Mapping[str, str], model_dir: Path) -> AsyncIterator[Mapping[str, str]]:
    """Both engines; after the test they have the weights that they had."""
    try:
        yield workers
    finally:
        for kind, url in workers.items():
            async with open_engine(f"{kind}={url}", tokenizer=Tokenizer.load(model_dir)) as engine:
                await engine.update_weights(model_dir, "0")


async def test_weights_change_under_live_tool_loops(renewed: Mapping[str, str], model_dir: Path, tmp_path: Path):
    """Twice, on both engines: in turns, and between turns. What samples say of every version is the truth of it."""
    played = await play_on_the_chain(
        tmp_path,
        model_dir,
        renewed,
        script=[CALL, LONG, *[CALL] * (TURNS - 1)],
        # Each has a turn before the first update, for somebody has met all of them, and one after the last.
        prompts=prompts(calls=TURNS + 1, meets_after=1, members=SESSIONS, updates=2),
        weights={
            "noise": NOISE,
            "sweep_s": 600.0,
            "updates": [{"when": "in_turn", "after_turns": SESSIONS + 1}, {"when": "in_tool_call"}],
        },
        checks={"min_finished": SESSIONS, "min_policy_versions": 3, "min_proximal_tokens": TURNS},
    )
    samples = [json.loads(line) for line in (played.out / "samples.jsonl").read_text().splitlines()]
    made = {number: played.out / "checkpoints" / str(number) for number in (1, 2)}
    telling = sorted(samples, key=count_met)[-2:]  # a forward pass for each of them and each version
    verdict = ground_truth.compare(telling, {0: model_dir, **made})

    assert {record.outcome for record in played.rollouts.values()} == {OutcomeKind.FINISHED}
    for number in range(SESSIONS):
        assert played.answers(number) == {"answered": TURNS + 1, "told": []}
    for sample in samples:
        assert {0, 2} <= {*sample["behavior_versions"]}
    assert verdict.third_states == []
    assert max(verdict.behavior_difference, verdict.proximal_difference) < TOLERANCE, [*verdict.lines()]
    assert verdict.moved > 10 * TOLERANCE

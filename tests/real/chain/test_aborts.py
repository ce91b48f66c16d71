"""Sessions that end from outside, on the whole chain: agents on the openai SDK, our router, one SGLang and one vLLM."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from harness.samples.rollout import OutcomeKind
from tests.real.chain.suite import SESSIONS, TURNS, play_on_the_chain, prompts
from tests.real.chain.tool_loop import CALL, ENDLESS

pytestmark = pytest.mark.agent


async def test_agents_that_take_nothing_for_the_end(workers: Mapping[str, str], model_dir: Path, tmp_path: Path):
    """Drained and aborted in their seventh turn, they continue asking, in vain; those that never stop are killed."""
    asked_in_vain, stubborn = 4, range(SESSIONS)
    played = await play_on_the_chain(
        tmp_path,
        model_dir,
        workers,
        script=[*[CALL] * TURNS, ENDLESS],
        prompts=[
            *prompts(calls=TURNS + 1 + asked_in_vain, meets_after=TURNS, members=SESSIONS, stubborn=True),
            # The last two meet when they are all that is left: each of the others came to its point, and to its end.
            *prompts(2, calls=100_000, meets_after=1, members=2 * SESSIONS + 2, stubborn=True),
        ],
        faults=[
            {"action": "drain", "at_turn": TURNS + 1, "at_token": 4, "sessions": [*stubborn]},
            {"action": "abort_engine", "at_turn": TURNS + 1, "at_token": 4, "sessions": [*stubborn]},
            {
                "action": "end_rollout",
                "at_turn": 2,
                "at_token": 4,
                "sessions": [SESSIONS, SESSIONS + 1],
                "seconds": 0.5,
            },
        ],
    )

    assert {*played.firings} == {("abort_engine", ""), ("drain", ""), ("end_rollout", "")}
    for number in stubborn:
        turns = played.sessions[number].turns.values()
        answer = played.answers(number)
        assert answer["answered"] + len(answer["told"]) == TURNS + 1 + asked_in_vain
        assert len(answer["told"]) >= asked_in_vain
        assert answer["answered"] == sum(turn.status == "completed" for turn in turns) >= TURNS
        assert len(turns) <= TURNS + 1
    assert {played.rollouts[number].outcome for number in (SESSIONS, SESSIONS + 1)} == {OutcomeKind.DRAINED}


async def test_drains_in_a_row(workers: Mapping[str, str], model_dir: Path, tmp_path: Path):
    """Each in the second turn of two sessions that met before it; after each one the next two are served.

    The last two have their six turns. What a drain leaves behind shows in the next one; hundreds in a row are the
    subject of `soak/abort_cycles.py`, ten of the shipped scenario.
    """
    pairs = 2
    met = [
        {"calls": 3, "meeting": f"of pair {pair}", "meets_after": 1, "members": 2}
        for pair in range(pairs)
        for _ in range(2)
    ]
    played = await play_on_the_chain(
        tmp_path,
        model_dir,
        workers,
        script=[CALL] * TURNS,
        concurrency=2,
        prompts=[{"metadata": each} for each in (*met, *[{"calls": TURNS}] * 2)],
        faults=[
            {"action": "drain", "at_turn": 2, "at_token": 2, "sessions": [2 * pair, 2 * pair + 1]}
            for pair in range(pairs)
        ],
        checks={"min_finished": 2},
    )
    drained, after = range(2 * pairs), range(2 * pairs, 2 * pairs + 2)

    assert played.firings == [("drain", "")] * pairs
    assert {played.rollouts[number].outcome for number in drained} == {OutcomeKind.DRAINED}
    for number in drained:  # what was in flight is handed over, or is not; then it is over
        assert played.answers(number)["answered"] in (1, 2)
        assert len(played.answers(number)["told"]) == 1
    assert [played.answers(number)["answered"] for number in after] == [TURNS, TURNS]

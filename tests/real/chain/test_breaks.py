"""What breaks between agents, session server and engines, on the whole chain: every answer arrives all the same."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from harness.gateway.router.gateway_program import GatewayProgram
from harness.samples.rollout import OutcomeKind
from tests.real.chain.suite import SESSIONS, TURNS, Played, play_on_the_chain, prompts
from tests.real.chain.tool_loop import CALL, LONG
from tests.real_engines import of_one_version

pytestmark = pytest.mark.agent


def assert_every_answer_arrived(played: Played, sessions: range) -> None:
    """Each call was answered, by one whole turn."""
    for number in sessions:
        assert played.rollouts[number].outcome is OutcomeKind.FINISHED
        assert played.answers(number) == {"answered": TURNS, "told": []}
        assert [turn.status for turn in played.sessions[number].turns.values()] == ["completed"] * TURNS


async def test_everything_between_agents_and_engines_breaks(
    workers: Mapping[str, str], model_dir: Path, tmp_path: Path
):
    """Connections to real engines break before a turn and in the middle of it, the way to all of them is gone for a
    while, the session server is killed.
    """
    played = await play_on_the_chain(
        tmp_path,
        model_dir,
        workers,
        script=[CALL, LONG, CALL, CALL, CALL, LONG],
        prompts=prompts(calls=TURNS, meets_after=TURNS - 1, members=SESSIONS),
        faults=[
            {"action": "slow_network", "at_turn": 1, "sessions": [3], "seconds": 0.3},
            {"action": "engine_500", "at_turn": 2, "sessions": [0]},
            {"action": "engine_hang", "at_turn": 2, "at_token": 5, "sessions": [1], "seconds": 0.4},
            {"action": "cut_connection", "at_turn": 2, "at_token": 7, "sessions": [2]},
            {"action": "malformed_reply", "at_turn": 3, "sessions": [0]},
            {"action": "duplicate_request", "at_turn": 3, "at_token": 9, "sessions": [1]},
            {"action": "stop_agent", "at_turn": 3, "sessions": [2], "seconds": 0.4},
            {"action": "kill_server", "at_turn": 3, "at_token": 12, "sessions": [4], "seconds": 0.3},
            {"action": "kill_engine", "at_turn": 4, "at_token": 4, "sessions": [5], "seconds": 0.5},
            # All have met by then, so everything that was killed is back.
            {"action": "cut_connection", "at_turn": TURNS, "sessions": [6]},
            {"action": "cut_connection", "probability": 0.1},
        ],
    )

    assert_every_answer_arrived(played, range(SESSIONS))
    assert {problem for _, problem in played.firings} == {""}
    # Its answer had begun when the connection broke: nobody but the engine knows how much had been sampled.
    assert played.sessions[6].turns[TURNS - 1].unknown


async def test_a_real_engine_dies(vllm_url: str, smg: GatewayProgram, model_dir: Path, tmp_path: Path):
    """It is killed in the middle of turns, for good; its sessions continue at the other one, turns and all.

    The one that dies is started for this play, and ends with it.
    """
    del smg  # installed before anything begins
    async with of_one_version(vllm_url, label="0"):  # as the other one begins
        played = await play_on_the_chain(
            tmp_path,
            model_dir,
            {"vllm": vllm_url},
            script=[*[CALL] * (TURNS - 1), LONG],
            prompts=prompts(calls=TURNS, meets_after=TURNS - 1, members=SESSIONS),
            # So late in a long turn that the others, who met it before that, have begun theirs.
            faults=[{"action": "kill_engine", "at_turn": TURNS, "at_token": 40, "sessions": [*range(SESSIONS)]}],
        )

    assert_every_answer_arrived(played, range(SESSIONS))
    assert played.firings == [("kill_engine", "")]
    [unwitnessed] = played.report.witness.unwitnessed  # of both, for they are counted together
    assert unwitnessed.tokens > 0

"""Rollouts over three raylets: the loss of a controller and of a node during a pause costs what they had, and no more.

One story, told by a program of its own (`story.py`); half of its minute is Ray's start.
"""

import json
import os
import subprocess
import sys
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.checkout import ROOT
from tests.toy_model import write_toy_model

STORY_S = 280
TOKENS, TURNS = 40, 5
"""Of an answer, and of a rollout of the story's."""

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.timeout(STORY_S + 20)]


@pytest.fixture(name="story", scope="module")
def _story(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What happened."""
    folder = tmp_path_factory.mktemp("ray")
    write_toy_model(folder / "model")
    (folder / "script.toml").write_text(f'[[steps]]\ntext = "{"x" * (TOKENS - 1)}"\ntoken_delay_s = 0.02\n')
    with TemporaryDirectory(prefix="ray-") as sockets:  # their paths have to be short
        done = subprocess.run(
            [sys.executable, "-m", "tests.system.ray.story", folder],
            cwd=ROOT,
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": sockets},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=STORY_S,
        )
    lines = done.stdout.decode().splitlines()
    assert done.returncode == 0, "\n".join(lines[-60:])
    return json.loads(next(line for line in reversed(lines) if line.startswith('{"refused"')))


def require_whole(rollouts: list[dict[str, Any]]) -> None:
    """Every turn was served once, its tokens came to the controller, and none is unaccounted for."""
    for each in rollouts:
        assert (each["outcome"], each["statuses"]) == ("finished", [200] * TURNS)
        assert (each["samples"], each["tokens"], each["trained"]) == (1, TOKENS * TURNS, TOKENS * TURNS)
        assert each["unaccounted"] == 0


def test_a_node_without_the_tokenizer_is_named_and_nothing_is_left(story: Any) -> None:
    assert "does not serve sessions: harness.errors.TokenizerError: expected a HuggingFace folder" in story["refused"]
    assert "no-model" in story["refused"]
    assert story["left_by_refused"] == 0


def test_a_start_that_ends_at_a_later_node_leaves_nothing_of_the_earlier_ones(story: Any) -> None:
    assert (story["stumbled"], story["left_by_stumbling"]) == ("no second one", 0)


def test_the_gates_of_a_controller_that_was_killed_open_again(story: Any) -> None:
    """After the time to live of its holds; its rollouts end, and the next controller works on the same nodes."""
    assert story["gates_of_the_dead"] == ["paused"] * 3
    assert story["gates_then"] == ["open"] * 3
    require_whole(story["after_the_dead"])


def test_a_second_controller_with_another_setup_is_refused(story: Any) -> None:
    """It is told what differs, and the first one has lost nothing: the rest of the story is its."""
    assert story["second_controller"].endswith("an earlier controller has started it with another tokenizer")


def test_a_node_that_is_lost_during_a_pause_costs_its_sessions(story: Any) -> None:
    """Each has an outcome; the others continue when the gate opens, which it does, and later rollouts run beside it."""
    lost = [each for each in story["after_the_loss"] if each["outcome"] != "finished"]

    assert [each["outcome"] for each in lost] == ["harness_failed"]
    assert "was lost, and the session with it" in lost[0]["detail"]
    assert len(story["after_the_loss"]) == 6
    require_whole([each for each in story["after_the_loss"] if each not in lost])
    assert story["gates_left"] == ["open"] * 2
    require_whole(story["on_the_others"])


def test_a_rollout_of_a_lost_node_goes_on_elsewhere(story: Any) -> None:
    """With its record, which the others read: what it had is not sampled again."""
    [moved] = [each for each in story["after_the_loss"] if each["inherited"]]

    assert moved["inherited"] % TOKENS == 0
    assert TOKENS <= moved["inherited"] < moved["trained"] == TOKENS * TURNS


def test_no_turn_passes_a_shut_gate(story: Any) -> None:
    """A call that was made while it was shut is answered after it has opened."""
    shut, opened = story["shut"]
    calls = [call for each in story["after_the_loss"] for call in each["times"]]

    assert [call for call in calls if shut < call[0] and call[1] < opened] == []
    assert [call for call in calls if call[0] < opened < call[1]] != []


def test_an_abort_reaches_the_agents_of_every_node(story: Any) -> None:
    """Their partial samples come back, and the gate is open; a rollout that is cancelled leaves no session."""
    assert {each["outcome"] for each in story["aborted"]} == {"drained"}
    assert all(each["samples"] == 1 and each["unaccounted"] == 0 for each in story["aborted"])
    assert (len(story["aborted"]), story["abort_problems"], story["gates_at_last"]) == (4, [], ["open"] * 2)
    assert story["cancelled"]


def test_the_end_leaves_no_actor(story: Any) -> None:
    assert story["left_at_last"] == 0

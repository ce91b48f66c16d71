"""The games of the bundled scenarios follow their own rules, whatever a model answers."""

import runpy
from typing import Any

import pytest

from harness.suite.scenarios.folder import bundled_scenarios

FOLDERS = {folder.name: folder for folder in bundled_scenarios()}


def _game(name: str, **options: Any) -> Any:
    return runpy.run_path(str(FOLDERS[name].directory / "game.py"))["Game"](options)


def _score(name: str, *arguments: Any) -> Any:
    return runpy.run_path(str(FOLDERS[name].directory / "check.py"))["score"](*arguments)


def test_hints_close_in_on_the_number():
    """In words or as the arguments of a tool call; what is known is said again."""
    game = _game("quickstart", secret=13, highest=20, answers=8)

    assert game.reply("My guess is 10.") == "10 is too low. Guess higher, from 11 to 20."
    assert game.reply('{"number": 17}') == "17 is too high. Guess lower, from 11 to 16."
    assert game.reply("No idea") == "I heard no number. Guess from 11 to 16."
    assert game.reply('{"number": 13}') is None
    assert game.result() == {"secret": 13, "guesses": [10, 17, 13], "found": True}


def test_the_guessing_ends_when_the_answers_are_used_up():
    """Answers without a number count."""
    game = _game("quickstart", secret=13, highest=20, answers=2)

    assert [game.reply("hm") is None, game.reply("1") is None] == [False, True]
    assert not game.result()["found"]


def test_a_wrong_sum_is_corrected():
    """The last number of an answer is the sum."""
    game = _game("long_session", sums=3, seed=1)
    (a, b), (c, d) = game.sums[:2]

    assert game.reply(f"{a} + {b} = {a + b}") == f"Right. {c} + {d} = ?"
    assert game.reply("what?").startswith(f"No, {c} + {d} = {c + d}. ")
    assert game.reply("") is None
    assert game.result() == {"asked": 3, "right": 1}


def test_the_host_notices_a_cut():
    """A sentence without an end was cut off."""
    game = _game("length_limited", questions=2)

    assert game.reply("In a") == "You were cut off. What does the fox find one morning?"
    assert game.reply("A stone.") == "Who comes along?"
    assert game.reply("An owl.") is None


def _session(*calls: bool, status: str = "completed") -> dict[str, Any]:
    return {"turns": [{"status": status, "reply": {"tool_calls": [{}] if call else None}} for call in calls]}


@pytest.mark.parametrize(
    ("guesses", "found", "low", "high"),
    [([13], True, 1.0, 1.1), ([1, 2, 13], True, 0.9, 1.0), ([12], False, 0.4, 0.5), ([], False, 0, 0)],
)
def test_finding_the_number_early_is_worth_most(guesses: list[int], found: bool, low: float, high: float):
    """Then finding it late, then coming close."""
    game = {"guesses": guesses, "found": found}
    score = _score("quickstart", _session(False), {"game": game}, {"game": {"secret": 13, "highest": 20}})

    assert low <= score["reward"] <= high


def test_a_tool_call_earns_a_bonus():
    """Per turn, so that calling it always is best."""
    metadata = {"game": {"secret": 13, "highest": 20}}
    rewards = [
        _score("quickstart", _session(*calls), None, metadata)["reward"]
        for calls in ((False, False), (True, False), (True, True))
    ]
    assert rewards == [0.0, 0.05, 0.1]


def test_sessions_without_a_turn_are_scored():
    """An agent that never started must not break a check."""
    assert _score("quickstart", _session(), None, {"game": {"secret": 1, "highest": 2}})["reward"] == 0.0
    assert _score("long_session", _session(), None, {"game": {"sums": 4}})["reward"] == 0.0
    assert _score("length_limited", _session(), None, {})["reward"] == 0.0

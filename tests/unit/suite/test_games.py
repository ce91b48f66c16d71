"""The games of the bundled scenarios follow their own rules, whatever a model answers."""

import json
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


MARKS = runpy.run_path(str(FOLDERS["train_tool_game"].directory / "game.py"))


def _goes_to(room: str, name: str = "go") -> dict[str, Any]:
    return {"tool_calls": [{"id": "1", "function": {"name": name, "arguments": json.dumps({"room": room})}}]}


def test_marks_show_one_room_at_a_time():
    """Wherever the walker goes; after four rooms the walk is over."""
    route = MARKS["route_of"](7)
    game, other = MARKS["Game"](route), next(room for room in MARKS["ROOMS"] if room not in route)

    assert game.opening() == f"The marks in the hall lead to the {route[0]}."
    assert game.go(_goes_to(route[0])) == f"This is the {route[0]}. The marks lead to the {route[1]}."
    assert game.go(_goes_to(other)) == f"This is the {other}. The marks lead to the {route[2]}."
    assert game.go(_goes_to(route[2])).endswith(f"to the {route[3]}.")
    assert game.go(_goes_to(route[3])) == ""
    assert (game.is_over, game.walked) == (True, [route[0], other, route[2], route[3]])


@pytest.mark.parametrize(
    "answer",
    [
        {"content": "I go to the long chapel."},
        {"tool_calls": []},
        _goes_to("attic"),
        _goes_to("long chapel", name="run"),
        {"tool_calls": [{"id": "1", "function": {"name": "go", "arguments": '{"room": "long chapel"'}}]},
        {"tool_calls": [{"id": "1", "function": {"name": "go", "arguments": '["long chapel"]'}}]},
        {"tool_calls": [{"id": "1", "function": {"name": "go", "arguments": '{"room": ["long chapel"]}'}}]},
    ],
)
def test_a_call_that_is_none_ends_the_walk(answer: dict[str, Any]):
    game = MARKS["Game"](["long chapel", "cold kitchen", "blue library", "deep cellar"])
    game.go(_goes_to("long chapel"))

    assert game.go(answer) == ""
    assert game.is_over
    assert MARKS["followed"](game.route, game.walked) == 0.25


def test_games_of_one_seed_are_one_game():
    """Those of a group are compared; four different rooms each."""
    routes = [MARKS["route_of"](seed) for seed in range(200)]

    assert MARKS["route_of"](2**63 - 1) == MARKS["route_of"](2**63 - 1)
    assert {len(set(route)) for route in routes} == {4}
    assert {room for route in routes for room in route} == set(MARKS["ROOMS"])


@pytest.mark.parametrize(("rooms", "reward"), [(0, 0.0), (1, 0.25), (3, 0.75), (4, 1.0)])
def test_each_step_along_the_marks_is_a_quarter(rooms: int, reward: float):
    """Of the game that the seed of the group names."""
    walked = MARKS["route_of"](5)[:rooms]
    turns = [{"turn": 0, "status": "failed"}, *({"turn": turn, "status": "completed"} for turn in range(1, 5))]

    assert _score("train_tool_game", {"turns": turns}, {"walked": walked}, {"group_seed": 5}) == {
        "reward": reward,
        "turn_rewards": dict.fromkeys(range(1, rooms + 1), 0.25),
        "rooms": rooms,
    }


def test_a_step_that_left_the_marks_earns_nothing():
    """The one before and the one behind it do."""
    route = MARKS["route_of"](5)
    turns = [{"turn": turn, "status": "completed"} for turn in range(3)]
    scored = _score("train_tool_game", {"turns": turns}, {"walked": [route[0], route[0], route[2]]}, {"group_seed": 5})

    assert (scored["reward"], scored["turn_rewards"]) == (0.5, {0: 0.25, 2: 0.25})


def test_a_walk_without_a_result_has_no_reward():
    """It was cut short: that is not the same as a bad one."""
    with pytest.raises(ValueError, match="got no result after 2 turns"):
        _score("train_tool_game", {"turns": [1, 2]}, None, {"group_seed": 5})

"""A quarter for every step that went where the marks led, earned by the turn that made the step."""

import runpy
from pathlib import Path
from typing import Any

Json = dict[str, Any]

game = runpy.run_path(str(Path(__file__).with_name("game.py")))


def score(session: Json, result: Json | None, metadata: Json) -> Json:
    """The reward of one walk; one that was not walked to its end has none."""
    if result is None:
        raise ValueError(f"expected the rooms that were walked, got no result after {len(session['turns'])} turns")
    walked, route = result["walked"], game["route_of"](metadata["group_seed"])
    made = [turn["turn"] for turn in session["turns"] if turn["status"] != "failed"]  # one room each, but the last
    steps = zip(made, walked, route, strict=False)
    return {
        "reward": game["followed"](route, walked),
        "turn_rewards": {turn: 1 / game["STEPS"] for turn, room, goal in steps if room == goal},
        "rooms": len(walked),
    }

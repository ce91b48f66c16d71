"""A quarter for every step that went where the marks led."""

import runpy
from pathlib import Path
from typing import Any

Json = dict[str, Any]

game = runpy.run_path(str(Path(__file__).with_name("game.py")))


def score(session: Json, result: Json | None, metadata: Json) -> Json:
    """The reward of one walk; one that was not walked to its end has none."""
    if result is None:
        raise ValueError(f"expected the rooms that were walked, got no result after {len(session['turns'])} turns")
    walked = result["walked"]
    return {"reward": game["followed"](game["route_of"](metadata["group_seed"]), walked), "rooms": len(walked)}

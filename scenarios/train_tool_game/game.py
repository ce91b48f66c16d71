"""Follow the marks: a walk of four steps through a house of twelve rooms.

Marks in the hall lead to a first room; each room that the walker enters shows where they lead next, whichever room it
is. A step is worth a quarter when it goes where the marks lead. A call that is none, or a room that the house does not
have, ends the walk.
"""

import json
import random
from typing import Any

Message = dict[str, Any]

ROOMS = (
    "long chapel",
    "cold kitchen",
    "blue library",
    "deep cellar",
    "stone vault",
    "south porch",
    "dusty attic",
    "round studio",
    "inner yard",
    "green terrace",
    "quiet nook",
    "old museum",
)
STEPS = 4
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "go",
            "description": "Go to a room.",
            "parameters": {"type": "object", "required": ["room"], "properties": {"room": {"type": "string"}}},
        },
    }
]


def route_of(seed: int) -> list[str]:
    """The rooms that the marks of one game lead to, all different."""
    return random.Random(seed).sample(ROOMS, STEPS)  # noqa: S311  # a game, no secret


class Game:
    """One walk along `route`."""

    def __init__(self, route: list[str]) -> None:
        self.route = route
        self.walked: list[str] = []
        self.is_over = False

    def opening(self) -> str:
        return f"The marks in the hall lead to the {self.route[0]}."

    def go(self, message: Message) -> str:
        """The result of the call that the model's `message` makes; empty when the walk is over."""
        room = room_of(message)
        if room is not None:
            self.walked.append(room)
        self.is_over = room is None or len(self.walked) == STEPS
        return "" if self.is_over else f"This is the {room}. The marks lead to the {self.route[len(self.walked)]}."


def room_of(message: Message) -> str | None:
    """The room that the first call in `message` goes to; None when there is no such call, or no such room."""
    try:
        function = message["tool_calls"][0]["function"]
        room = json.loads(function["arguments"])["room"]
    except (KeyError, IndexError, TypeError, ValueError):
        return None
    return room if function["name"] == "go" and room in ROOMS else None


def followed(route: list[str], walked: list[str]) -> float:
    """The share of `route` that was walked where the marks led."""
    return sum(goal == room for goal, room in zip(route, walked, strict=False)) / STEPS

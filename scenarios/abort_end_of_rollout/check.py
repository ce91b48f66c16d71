"""Worth 1 when nothing invalid can come out of the session: an incomplete turn is the last of its branch.

Every turn that the agent was answered is on record, and no tool loop went on from half an answer.
"""

from typing import Any

Json = dict[str, Any]


def score(session: Json, result: Json | None, metadata: Json) -> Json:  # noqa: ARG001  # checks take three
    """The reward, and what was seen."""
    turns = {turn["turn"]: turn for turn in session["turns"]}
    went_on = [turn["turn"] for turn in turns.values() if follows_incomplete(turn, turns)]
    answered = (result or {}).get("answered", 0)
    completed = sum(turn["status"] == "completed" for turn in turns.values())
    return {
        "reward": float(not went_on and answered <= completed),
        "went_on_after_incomplete": went_on,
        "statuses": [turn["status"] for turn in turns.values()],
    }


def follows_incomplete(turn: Json, turns: dict[int, Json]) -> bool:
    """Whether the turn goes on from one that is not complete."""
    parent = turns.get(turn["parent"])
    return parent is not None and parent["status"] != "completed"

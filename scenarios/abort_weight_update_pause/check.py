"""Worth 1 when the agent got every answer it asked for, each of them whole and on record once."""

from typing import Any

Json = dict[str, Any]


def score(session: Json, result: Json | None, metadata: Json) -> Json:
    """The reward, and in how many requests to the engine each turn was sampled."""
    completed = [turn for turn in session["turns"] if turn["status"] == "completed"]
    answered = (result or {}).get("answered")
    return {
        "reward": float(answered == metadata["calls"] == len(completed) == len(session["turns"])),
        "requests": [len(turn["segments"]) for turn in session["turns"]],
        "refusals": session["refusals"],
    }

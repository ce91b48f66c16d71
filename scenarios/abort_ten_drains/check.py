"""Worth 1 when the session ended in one of two ways: everything was answered, or it was refused."""

from typing import Any

Json = dict[str, Any]


def score(session: Json, result: Json | None, metadata: Json) -> Json:
    """The reward, and how the session ended."""
    incomplete = {turn["turn"] for turn in session["turns"] if turn["status"] != "completed"}
    went_on = [turn["turn"] for turn in session["turns"] if turn["parent"] in incomplete]
    was_answered = (result or {}).get("answered") == metadata["calls"]
    was_refused = bool(session["refusals"])
    return {"reward": float(not went_on and was_answered != was_refused), "refusals": session["refusals"]}

"""Worth 1 when the agent was refused and nothing was sampled behind an incomplete turn, however often it asked."""

from typing import Any

Json = dict[str, Any]


def score(session: Json, result: Json | None, metadata: Json) -> Json:  # noqa: ARG001  # checks take three
    """The reward, and what the agent was told how often."""
    incomplete = {turn["turn"] for turn in session["turns"] if turn["status"] != "completed"}
    went_on = [turn["turn"] for turn in session["turns"] if turn["parent"] in incomplete]
    return {
        "reward": float(not went_on and bool(session["refusals"])),
        "went_on_after_incomplete": went_on,
        "refusals": session["refusals"],
    }

"""Worth 1 when nothing was sampled behind an incomplete turn, however often the agent asked, and it was refused.

An agent that was ended before its first call was not.
"""

from typing import Any

Json = dict[str, Any]


def score(session: Json, result: Json | None, metadata: Json) -> Json:  # noqa: ARG001  # checks take three
    """The reward, and what the agent was told how often."""
    incomplete = {turn["turn"] for turn in session["turns"] if turn["status"] != "completed"}
    went_on = [turn["turn"] for turn in session["turns"] if turn["parent"] in incomplete]
    return {
        "reward": float(not went_on and bool(session["refusals"] or not session["turns"])),
        "went_on_after_incomplete": went_on,
        "refusals": session["refusals"],
    }

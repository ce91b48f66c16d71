"""A story is worth the share of its chapters that were told; its logprobs are checked from outside.

How often the weights changed inside its turns is kept beside the reward.
"""

from typing import Any

Json = dict[str, Any]


def score(session: Json, result: Json | None, metadata: Json) -> Json:
    """The reward of one story."""
    told = ((result or {}).get("game") or {"told": 0})["told"]
    versions = [{span["version"] for span in turn["weight_versions"]} for turn in session["turns"]]
    return {
        "reward": told / metadata["game"]["chapters"],
        "versions": sorted(set().union(*versions)),
        "turns_with_two_versions": sum(len(each) > 1 for each in versions),
    }

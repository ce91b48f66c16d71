"""Finding the number is worth 1 minus a little for every guess; coming close is worth half of that at most.

Every turn that is a well-formed tool call earns a bonus: calling the tool is rewarded, not required.
"""

from typing import Any

Json = dict[str, Any]

TOOL_BONUS = 0.1
COST_PER_GUESS = 0.05


def score(session: Json, result: Json | None, metadata: Json) -> Json:
    """The reward of one game."""
    game = (result or {}).get("game") or {"guesses": [], "found": False}
    turns = session["turns"]
    called = sum(bool(turn["reply"].get("tool_calls")) for turn in turns)
    guessing = found(game) if game["found"] else closeness(game["guesses"], metadata["game"])
    bonus = TOOL_BONUS * called / len(turns) if turns else 0.0
    return {"reward": guessing + bonus, "guesses": len(game["guesses"]), "tool_calls": called, "found": game["found"]}


def found(game: Json) -> float:
    """From 1 downwards, the longer it took."""
    return max(0.5, 1 - COST_PER_GUESS * (len(game["guesses"]) - 1))


def closeness(guesses: list[int], options: Json) -> float:
    """Up to 0.5 for the best guess of a game that was not won."""
    if not guesses:
        return 0.0
    distance = min(abs(guess - options["secret"]) for guess in guesses)
    return 0.5 * max(0.0, 1 - distance / options["highest"])

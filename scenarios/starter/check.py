"""The reward of one session: 1 for the right number at once, half as much for every wrong answer before it."""

from typing import Any


def score(session: dict[str, Any], result: dict[str, Any] | None, metadata: dict[str, Any]) -> dict[str, Any]:
    """`session` is the server's record, turn by turn; `result` what the agent has left, None where it left nothing."""
    answers = (result or {}).get("answers", [])
    is_right = bool(answers) and answers[-1] == str(len(metadata["word"]))
    return {
        "reward": 0.5 ** (len(answers) - 1) if is_right else 0.0,
        "answers": len(answers),
        "turns": len(session["turns"]),
    }

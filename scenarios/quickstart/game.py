"""Guess my number: the host answers every guess with "too high", "too low" or "right".

A guess is a number, called out in words or with the tool `guess`; the first number of an answer counts. An answer
without one is asked for again and costs a turn like any other.
"""

import json
import re
from typing import Any

NUMBER = re.compile(r"-?\d+")

Message = dict[str, Any]


class Game:
    """One game; `options` gives the `secret` and the `highest` number it may be."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.secret = options["secret"]
        self.low, self.high = 1, options["highest"]
        self.guesses = []

    def examples(self) -> list[Message]:
        """A game that somebody else has played: a small model learns the rules from it, not from a text."""
        return [
            *exchange("c1", "My number is from 1 to 20. Your guess?", 12),
            *exchange("c2", "12 is too high. Guess from 1 to 11.", 6),
            *exchange("c3", "6 is too low. Guess from 7 to 11.", 9),
        ]

    def opening(self) -> str:
        return f"9 is right! New game: my number is from {self.low} to {self.high}. Your guess?"

    def reply(self, answer: str) -> str | None:
        found = NUMBER.search(answer)
        if found is None:
            return f"I did not hear a number. Guess from {self.low} to {self.high}."
        guess = int(found[0])
        self.guesses.append(guess)
        if guess == self.secret:
            return None
        return self.hint(guess)

    def hint(self, guess: int) -> str:
        """What the host says to a wrong guess; what is known by now is said again."""
        if guess < self.secret:
            verdict, self.low = "too low", max(self.low, guess + 1)
        else:
            verdict, self.high = "too high", min(self.high, guess - 1)
        return f"{guess} is {verdict}. Guess from {self.low} to {self.high}."

    def result(self) -> dict[str, Any]:
        return {"secret": self.secret, "guesses": self.guesses, "found": self.secret in self.guesses}


def exchange(call_id: str, question: str, guess: int) -> list[Message]:
    """A question of the host and the tool call that answers it."""
    function = {"name": "guess", "arguments": json.dumps({"number": guess})}
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [{"id": call_id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call_id, "content": "ok"},
    ]

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
    """One game; `options`: the `secret`, the `highest` number it may be, and how many `answers` are allowed."""

    reply_role = "user"
    """The host talks; a small model that reads hints as results of a tool begins to write results itself."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.secret = options["secret"]
        self.low, self.high = 1, options["highest"]
        self.answers_left = options["answers"]
        self.guesses = []

    def examples(self) -> list[Message]:
        """A game that somebody else has played: a small model learns the rules from it, not from a text."""
        return [
            {"role": "user", "content": "My number is from 1 to 30. Your guess?"},
            tool_call("example-1", 12),
            {"role": "user", "content": "12 is too high. Guess lower, from 1 to 11."},
            tool_call("example-2", 6),
            {"role": "user", "content": "6 is too low. Guess higher, from 7 to 11."},
            tool_call("example-3", 9),
        ]

    def opening(self) -> str:
        return f"9 is right! New game: my number is from {self.low} to {self.high}. Your guess?"

    def reply(self, answer: str) -> str | None:
        found = NUMBER.search(answer)
        self.answers_left -= 1
        if found is not None:
            self.guesses.append(int(found[0]))
        if self.secret in self.guesses or not self.answers_left:
            return None
        return self.hint(self.guesses[-1]) if found else f"I heard no number. Guess from {self.low} to {self.high}."

    def hint(self, guess: int) -> str:
        """The host's answer to a wrong guess, with everything that is known by now."""
        if guess < self.secret:
            verdict, self.low = "too low. Guess higher", max(self.low, guess + 1)
        else:
            verdict, self.high = "too high. Guess lower", min(self.high, guess - 1)
        return f"{guess} is {verdict}, from {self.low} to {self.high}."

    def result(self) -> dict[str, Any]:
        return {"secret": self.secret, "guesses": self.guesses, "found": self.secret in self.guesses}


def tool_call(call_id: str, guess: int) -> Message:
    """A guess as a well-formed tool call."""
    function = {"name": "guess", "arguments": json.dumps({"number": guess})}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }

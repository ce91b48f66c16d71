"""Mental arithmetic: one small sum after the other; a wrong answer is corrected and the next sum follows."""

import random
import re
from typing import Any

NUMBER = re.compile(r"\d+")
LARGEST = 9

Message = dict[str, Any]


class Game:
    """One drill of `options["sums"]` sums, the same ones for the same `options["seed"]`."""

    def __init__(self, options: dict[str, Any]) -> None:
        numbers = random.Random(options["seed"])  # noqa: S311  # a game, not a secret
        self.sums = [(numbers.randint(1, LARGEST), numbers.randint(1, LARGEST)) for _ in range(options["sums"])]
        self.asked = 0
        self.right = 0

    def examples(self) -> list[Message]:
        """Two sums that somebody else has answered: a small model learns the form of an answer from them."""
        return [
            {"role": "user", "content": "2 + 3 = ?"},
            {"role": "assistant", "content": "2 + 3 = 5"},
            {"role": "user", "content": "Right. 6 + 1 = ?"},
            {"role": "assistant", "content": "6 + 1 = 7"},
        ]

    def opening(self) -> str:
        return f"Right. {self.question()}"

    def reply(self, answer: str) -> str | None:
        left, right = self.sums[self.asked]
        numbers = NUMBER.findall(answer)
        is_right = bool(numbers) and int(numbers[-1]) == left + right
        self.right += is_right
        self.asked += 1
        if self.asked == len(self.sums):
            return None
        verdict = "Right." if is_right else f"No, {left} + {right} = {left + right}."
        return f"{verdict} {self.question()}"

    def question(self) -> str:
        """The sum that comes next."""
        left, right = self.sums[self.asked]
        return f"{left} + {right} = ?"

    def result(self) -> dict[str, Any]:
        return {"asked": self.asked, "right": self.right}

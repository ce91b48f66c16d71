"""A story told in answers that are cut: the host notices when a sentence has no end and says so."""

from typing import Any

QUESTIONS = ("What does the fox find one morning?", "Who comes along?", "What do they do together?", "How does it end?")
ENDINGS = (".", "!", "?", '"')

Message = dict[str, Any]


class Game:
    """One story; the questions are the same in every game."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.questions = iter(QUESTIONS[: options.get("questions", len(QUESTIONS))])
        self.answers = 0
        self.cut = 0

    def examples(self) -> list[Message]:
        """How short an answer is meant to be; the model will not keep to it for long."""
        return [
            {"role": "user", "content": "Who is the story about?"},
            {"role": "assistant", "content": "A little fox."},
        ]

    def opening(self) -> str:
        return "Where does the fox live?"

    def reply(self, answer: str) -> str | None:
        is_cut = not answer.rstrip().endswith(ENDINGS)
        self.answers += 1
        self.cut += is_cut
        question = next(self.questions, None)
        if question is None:
            return None
        return f"You were cut off. {question}" if is_cut else question

    def result(self) -> dict[str, Any]:
        return {"answers": self.answers, "cut": self.cut}

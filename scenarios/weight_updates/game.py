"""A story in chapters: after each one the host thinks for a while, as a tool would, and asks for the next.

The thinking is what makes room for weight updates while no turn is in flight.
"""

import time
from typing import Any

Message = dict[str, Any]


class Game:
    """One story; `options`: its `subject`, how many `chapters` it has, and how many seconds a tool takes (`tool_s`)."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.subject = options["subject"]
        self.chapters = options["chapters"]
        self.tool_s = options["tool_s"]
        self.told = 0

    def opening(self) -> str:
        return f"Tell me a story about {self.subject}. One sentence for a chapter. The first chapter?"

    def reply(self, answer: str) -> str | None:
        self.told += bool(answer.strip())
        if self.told >= self.chapters:
            return None
        time.sleep(self.tool_s)
        return f"Good. Chapter {self.told + 1}, one sentence?"

    def result(self) -> dict[str, Any]:
        return {"told": self.told}

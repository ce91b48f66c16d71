# /// script
# requires-python = ">=3.11"
# dependencies = ["pydantic-ai-slim[openai]==2.68.0"]
# ///
"""The conversation with pydantic-ai."""

from collections.abc import AsyncIterable
from typing import Any

from conversation import MODEL, QUESTIONS, STREAMS, add, report
from pydantic_ai import Agent


async def watch(_context: Any, events: AsyncIterable[Any]) -> None:
    """Take every event; an agent with somebody who watches streams."""
    async for _ in events:
        pass


def main() -> None:
    """Ask every question."""
    agent = Agent(f"openai-chat:{MODEL}", tools=[add])
    history, answers = [], []
    for question in QUESTIONS:
        result = agent.run_sync(question, message_history=history, event_stream_handler=watch if STREAMS else None)
        history = result.all_messages()
        answers.append(result.output)
    report(answers)


if __name__ == "__main__":
    main()

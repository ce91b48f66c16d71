# /// script
# requires-python = ">=3.11"
# dependencies = ["pydantic-ai-slim[openai,anthropic]==2.68.0"]
# ///
"""pydantic-ai, by each of its clients."""

from collections.abc import AsyncIterable
from typing import Any

from conversation import MODEL, QUESTIONS, Way, play
from pydantic_ai import Agent
from typed_tools import TOOLS

CLIENTS = {"openai_responses": "openai", "openai_chat": "openai-chat", "anthropic_messages": "anthropic"}


async def watch(_context: Any, events: AsyncIterable[Any]) -> None:
    """Take every event, which has answers streamed."""
    async for _ in events:
        pass


async def converse(way: Way) -> list[str]:
    """Ask every question in one history."""
    agent = Agent(f"{CLIENTS[way.dialect]}:{MODEL}", tools=TOOLS)
    history, answers = [], []
    for question in QUESTIONS:
        handler = watch if way.streams else None
        result = await agent.run(question, message_history=history, event_stream_handler=handler)
        history = result.all_messages()
        answers.append(result.output)
    return answers


if __name__ == "__main__":
    play(converse)

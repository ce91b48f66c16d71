# /// script
# requires-python = ">=3.11"
# dependencies = ["ag2[openai]==1.2.1"]
# ///
"""AG2's agent, by each of its clients for OpenAI."""

import os

from ag2 import Agent
from ag2.config import OpenAIConfig, OpenAIResponsesConfig
from conversation import MODEL, QUESTIONS, Way, play
from typed_tools import TOOLS


async def converse(way: Way) -> list[str]:
    """Ask a question, and the next one of its reply."""
    config = OpenAIResponsesConfig if way.dialect == "openai_responses" else OpenAIConfig
    agent = Agent(
        "assistant",
        config=config(model=MODEL, base_url=os.environ["OPENAI_BASE_URL"], streaming=way.streams),
        tools=TOOLS,
    )
    first = await agent.ask(QUESTIONS[0])
    second = await first.ask(QUESTIONS[1])
    return [first.body, second.body]


if __name__ == "__main__":
    play(converse)

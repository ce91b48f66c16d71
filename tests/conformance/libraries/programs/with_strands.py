# /// script
# requires-python = ">=3.11"
# dependencies = ["strands-agents[openai]==1.62.0"]
# ///
"""Strands' agent with its chat completions model."""

from conversation import MODEL, QUESTIONS, Way, play
from strands import Agent, tool
from strands.models.openai import OpenAIModel
from typed_tools import TOOLS


def converse(way: Way) -> list[str]:
    """Ask every question of one agent."""
    agent = Agent(
        model=OpenAIModel(model_id=MODEL, stream=way.streams), tools=list(map(tool, TOOLS)), callback_handler=None
    )
    return [str(agent(question)) for question in QUESTIONS]


if __name__ == "__main__":
    play(converse)

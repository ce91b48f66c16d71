# /// script
# requires-python = ">=3.11"
# dependencies = ["haystack-ai==3.4.1"]
# ///
"""Haystack's agent with its chat completions generator."""

from conversation import MODEL, QUESTIONS, Way, play
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from typed_tools import TOOLS


def converse(way: Way) -> list[str]:
    """Ask every question in one history."""
    agent = Agent(
        chat_generator=OpenAIChatGenerator(model=MODEL, streaming_callback=take if way.streams else None),
        tools=list(map(create_tool_from_function, TOOLS)),
    )
    messages, answers = [], []
    for question in QUESTIONS:
        messages = agent.run(messages=[*messages, ChatMessage.from_user(question)])["messages"]
        answers.append(messages[-1].text)
    return answers


def take(chunk: object) -> None:
    """Listen, which has answers streamed."""


if __name__ == "__main__":
    play(converse)

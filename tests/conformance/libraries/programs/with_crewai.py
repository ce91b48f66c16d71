# /// script
# requires-python = ">=3.11"
# dependencies = ["crewai==1.15.30"]
# ///
"""CrewAI's agent."""

from conversation import MODEL, QUESTIONS, Way, play
from crewai import LLM, Agent
from crewai.tools import tool
from typed_tools import TOOLS


def converse(way: Way) -> list[str]:
    """Ask every question in one history of messages."""
    agent = Agent(
        role="Assistant",
        goal="Do what is asked.",
        backstory="It keeps notes.",
        llm=LLM(model=MODEL, provider="openai", stream=way.streams),
        tools=[tool(each.__name__)(each) for each in TOOLS],
    )
    messages, answers = [], []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answers.append(agent.kickoff(messages).raw)
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


if __name__ == "__main__":
    play(converse)

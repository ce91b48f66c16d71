# /// script
# requires-python = ">=3.11"
# dependencies = ["agno==3.1.10", "openai==3.57.0"]
# ///
"""agno's agent, by each of its clients for OpenAI."""

from agno.agent import Agent
from agno.db.in_memory import InMemoryDb
from agno.models.openai import OpenAIChat, OpenAIResponses
from conversation import MODEL, QUESTIONS, Way, play
from typed_tools import TOOLS


def converse(way: Way) -> list[str]:
    """Ask every question in one session of the agent."""
    model = (OpenAIResponses if way.dialect == "openai_responses" else OpenAIChat)(id=MODEL)
    agent = Agent(model=model, tools=TOOLS, db=InMemoryDb(), add_history_to_context=True, telemetry=False)
    answers = []
    for question in QUESTIONS:
        if way.streams:
            events = list(agent.run(question, session_id="one", stream=True))
            answers.append("".join(event.content for event in events if event.event == "RunContent" and event.content))
        else:
            answers.append(agent.run(question, session_id="one").content)
    return answers


if __name__ == "__main__":
    play(converse)

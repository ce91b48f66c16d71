# /// script
# requires-python = ">=3.11"
# dependencies = ["agent-framework-openai==1.17.0"]
# ///
"""Microsoft's agent framework, by each of its clients for OpenAI."""

from agent_framework import Agent, tool
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient
from conversation import MODEL, QUESTIONS, Way, play
from typed_tools import TOOLS


async def converse(way: Way) -> list[str]:
    """Ask every question in one session of the agent."""
    client = OpenAIChatClient if way.dialect == "openai_responses" else OpenAIChatCompletionClient
    agent = Agent(client=client(model=MODEL), tools=list(map(tool, TOOLS)))
    session, answers = agent.create_session(), []
    for question in QUESTIONS:
        if way.streams:
            answers.append((await agent.run(question, session=session, stream=True).get_final_response()).text)
        else:
            answers.append((await agent.run(question, session=session)).text)
    return answers


if __name__ == "__main__":
    play(converse)

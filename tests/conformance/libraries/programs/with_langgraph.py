# /// script
# requires-python = ">=3.11"
# dependencies = ["langgraph==1.2.24", "langchain==1.5.2", "langchain-openai==1.7.4", "langchain-anthropic==1.7.10"]
# ///
"""LangGraph's agent loop with LangChain's clients."""

from conversation import MODEL, QUESTIONS, Way, play
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from typed_tools import TOOLS


def converse(way: Way) -> list[str]:
    """Ask every question in one state."""
    if way.dialect == "anthropic_messages":
        model = ChatAnthropic(model=MODEL, max_tokens=1_000, streaming=way.streams)
    else:
        model = ChatOpenAI(
            model=MODEL, streaming=way.streams, use_responses_api=way.dialect == "openai_responses" or None
        )
    graph = create_agent(model, tools=TOOLS)
    messages, answers = [], []
    for question in QUESTIONS:
        messages = graph.invoke({"messages": [*messages, {"role": "user", "content": question}]})["messages"]
        answers.append(messages[-1].text)
    return answers


if __name__ == "__main__":
    play(converse)

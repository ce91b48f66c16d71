# /// script
# requires-python = ">=3.11"
# dependencies = ["semantic-kernel==1.45.0"]
# ///
"""Semantic Kernel's chat completion agent."""

from conversation import MODEL, QUESTIONS, Way, play
from semantic_kernel.agents import ChatCompletionAgent, ChatHistoryAgentThread
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function
from typed_tools import TOOLS


class Notes:
    """The tools as a plugin."""


for tool in TOOLS:
    setattr(Notes, tool.__name__, staticmethod(kernel_function(tool)))


async def converse(way: Way) -> list[str]:
    """Ask every question in one thread."""
    agent = ChatCompletionAgent(service=OpenAIChatCompletion(ai_model_id=MODEL), name="assistant", plugins=[Notes()])
    thread, answers = ChatHistoryAgentThread(), []
    for question in QUESTIONS:
        if way.streams:
            answers.append("".join([str(each.message) async for each in agent.invoke_stream(question, thread=thread)]))
        else:
            answers.append(str((await agent.get_response(question, thread=thread)).message))
    return answers


if __name__ == "__main__":
    play(converse)

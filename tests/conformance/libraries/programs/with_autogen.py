# /// script
# requires-python = ">=3.11"
# dependencies = ["autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5"]
# ///
"""AutoGen's assistant with its chat completions client."""

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelFamily
from autogen_ext.models.openai import OpenAIChatCompletionClient
from conversation import MODEL, QUESTIONS, Way, play
from typed_tools import TOOLS

INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "structured_output": True,
    "family": ModelFamily.UNKNOWN,
}


async def converse(way: Way) -> list[str]:
    """Ask every question of one assistant."""
    agent = AssistantAgent(
        "assistant",
        model_client=OpenAIChatCompletionClient(model=MODEL, model_info=INFO),
        tools=TOOLS,
        model_client_stream=way.streams,
        max_tool_iterations=10,
        reflect_on_tool_use=False,
    )
    return [(await agent.run(task=question)).messages[-1].content for question in QUESTIONS]


if __name__ == "__main__":
    play(converse)
